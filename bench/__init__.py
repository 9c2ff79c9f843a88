"""Benches. Each measures one path of the daemon and its physical limit in the same run, in turns."""
