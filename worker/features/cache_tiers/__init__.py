"""Records of the cache that are kept in files or in the memory of the host."""
