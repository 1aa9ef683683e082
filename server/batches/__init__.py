"""Work that waits: files of requests, batches of them, and responses that are computed later or kept."""
