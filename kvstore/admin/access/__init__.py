"""Access control: authentication and rate limits (`auth`), the audit log (`audit`).

May be imported from here: `Authenticator`, `Caller`, `Role` and `PEER` by routers and the server, `Audited`
and `AuditLog` by the application. Must not import routers, schemas or the daemon's state.
"""
