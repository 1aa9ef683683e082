"""Grammars of clients, compiled first in a process of their own."""
