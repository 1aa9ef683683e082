"""GGUF files of models with latent attention: what their metadata means, and the two halves of one matrix."""
