from __future__ import annotations

from hypothesis import HealthCheck, settings

# `pytest --hypothesis-profile=explore` looks for what the same few examples of every run don't meet.
_slow = [HealthCheck.too_slow, HealthCheck.filter_too_much]
settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True, suppress_health_check=_slow)
settings.register_profile("explore", settings.get_profile("ci"), derandomize=False, max_examples=5000)
settings.load_profile("ci")
