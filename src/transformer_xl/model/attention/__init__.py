"""How a query knows where a key stands: the paper's equation, and one class of blocks for each kind of attention."""
