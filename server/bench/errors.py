"""The one error of a benchmark that cannot be done."""


class BenchError(Exception):
    """One line for whoever asked: what was wrong, and what to do."""
