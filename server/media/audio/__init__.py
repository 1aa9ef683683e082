"""Recordings that requests bring: the processes that decode them, and where their features are kept."""
