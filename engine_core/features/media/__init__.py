"""What prompts have beside tokens: media in place of some, and sources that an encoder reads."""
