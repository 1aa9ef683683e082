"""Optional capabilities of the engine, each behind the contract of `engine_core/scheduling/feature.py`."""
