"""The Valkey and Redis backend: blocks as strings on one server or a cluster."""
