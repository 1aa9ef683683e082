"""Experts that ranks share: what they exchange, and where each lies."""
