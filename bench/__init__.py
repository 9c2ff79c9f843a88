"""Benches: each measures one path of the daemon beside its physical limit, interleaved in one run."""
