"""What a checkpoint is served as."""
