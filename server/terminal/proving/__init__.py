"""`facet prove`: stored answers and receipts against what this machine computes."""
