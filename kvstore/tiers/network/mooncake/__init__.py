"""A Mooncake store."""
