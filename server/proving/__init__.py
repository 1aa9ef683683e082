"""Grammars proved in a process of their own."""
