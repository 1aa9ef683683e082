"""How checkpoints store matrices."""
