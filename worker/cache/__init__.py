"""The paged KV cache: how many blocks it has, and which layers share them."""
