"""The decisions: events in, actions out. Pure: no I/O, no clock, no randomness, no log line in here."""
