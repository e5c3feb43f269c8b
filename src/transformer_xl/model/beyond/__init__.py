"""What becomes of positions that leave the memory of a Transformer-XL: the layer, the kinds of it, and the model."""
