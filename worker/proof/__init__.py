"""Computes what a model answers on this machine layer by layer, and compares kernels with their reference."""
