"""Commands of operators at run time: status, devices, settings, namespaces, event log, traces."""
