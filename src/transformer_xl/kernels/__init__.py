"""What a model computes most of the time: the paper's equation in plain code, and the same and other products faster."""
