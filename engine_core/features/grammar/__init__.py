"""Answers in a language, and thinking within a budget: what may come next in a text, step by step."""
