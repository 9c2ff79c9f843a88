"""Tenants: peer authentication, quotas, data keys, the catalog of namespaces, deletion and recovery.

Imports `runtime`. Does not import `server`, `network`, `operator` or `kv_events`.
"""
