"""Executes the core's actions against the tiers, recovers blocks at start-up, scrubs stored blocks."""
