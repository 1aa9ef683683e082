"""Options of shared experts."""
