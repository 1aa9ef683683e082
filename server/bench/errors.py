"""The error of a benchmark that cannot run."""


class BenchError(Exception):
    """A benchmark cannot run; the message is one line that says what was wrong and what to do."""
