"""Changes at run time, in small steps: limits of tiers, added and removed devices, the eviction policy.

Each change is a job that continues at every wake-up until it is done, while requests are served. May be
imported by `requests` and `placement`. Imports `transfers` and the rooms below it.
"""
