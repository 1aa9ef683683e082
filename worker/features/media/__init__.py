"""Media and sources of encoder-decoders: inputs that are encoded before a step reads them."""
