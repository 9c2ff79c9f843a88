"""Tenants: peer authentication, the namespaces of a tenant, and its quotas."""
