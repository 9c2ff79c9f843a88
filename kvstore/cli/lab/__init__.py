"""Commands of the lab: replays, sizing, recordings, traces, the demo."""
