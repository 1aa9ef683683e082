"""Starting and watching processes."""
