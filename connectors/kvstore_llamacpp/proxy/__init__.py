"""A reverse proxy that starts llama-server and keeps the prefixes of its slots in the store."""
