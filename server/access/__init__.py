"""Keys, quotas, refusing when busy."""
