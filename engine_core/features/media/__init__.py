"""Media in place of some of a prompt's tokens, and sources that an encoder reads."""
