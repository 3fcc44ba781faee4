"""Hypothesis: quick by default; `pytest tests/unit/coordinator --hypothesis-profile=deep` searches longer."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "deep",
    max_examples=1000,
    stateful_step_count=100,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
