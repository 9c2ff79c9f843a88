"""Copies between tiers: what is copied, which device takes it when, and what is worth writing to flash."""
