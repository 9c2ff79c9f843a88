"""What operators ask and change while the daemon runs: commands, devices, settings, event log, traces."""
