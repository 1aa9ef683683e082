"""Computes whole steps by recorded calls of C kernels."""
