"""Runs the placement core: executor, actions on tiers, durable answers, scrubber, saved policy state.

Imports `core` and `tiers`, and no sibling. `ports` may be imported from every room.
"""
