"""How hypothesis tries examples here: without time, as a shared machine may stand still for seconds."""

from hypothesis import HealthCheck, settings


def untimed(examples: int = 100) -> settings:
    """A decorator for tests with `given`, which are run with so many examples."""
    return settings(max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.too_slow])
