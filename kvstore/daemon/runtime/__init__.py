"""Runs the placement core: actions, tiers, start and stop, and the ports that other rooms take.

Imports `core` and `tiers`, and no sibling. `ports` may be imported from every room.
"""
