"""The network tier: downloads, uploads, calls of the backend, cached existence checks."""
