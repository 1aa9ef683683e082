"""Adapters: low-rank matrices beside those of a model, and heads, from files that PEFT saved."""
