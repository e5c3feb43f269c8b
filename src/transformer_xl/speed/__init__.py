"""How fast a model decodes and scores on a machine, and how fast the machine would let it."""
