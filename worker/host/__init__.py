"""Memory and pages of the machine."""
