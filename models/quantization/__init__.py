"""Reads the matrices of quantized checkpoints."""
