"""Authentication, rate limits, the audit log, and errors as problem details (RFC 9457)."""
