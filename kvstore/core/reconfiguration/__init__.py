"""Changes at run time, in small steps: limits of tiers, added and removed devices, the eviction policy."""
