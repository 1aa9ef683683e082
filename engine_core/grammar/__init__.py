"""Grammars of answers: compiling them in a thread, and following each answer through its own."""
