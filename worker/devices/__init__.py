"""A CPU or a CUDA card."""
