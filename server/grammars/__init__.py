"""What holds an answer to a form."""
