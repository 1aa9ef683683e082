"""Every option, read and checked."""
