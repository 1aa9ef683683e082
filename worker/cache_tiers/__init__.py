"""Blocks of the KV cache in files, where a later process finds the prefixes of prompts again."""
