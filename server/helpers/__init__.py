"""Helper processes, and the queues of their jobs."""
