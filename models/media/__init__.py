"""What pictures become before a model sees them: 8-bit pixels, and tokens in the prompt. No torch."""
