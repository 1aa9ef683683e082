"""States of hybrids that are remembered, so that a cached prefix can go on from them."""
