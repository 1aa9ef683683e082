"""What options of an engine that have parts of their own may say."""
