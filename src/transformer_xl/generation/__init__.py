"""Writing with a model: state, choice of the next token, and the loop that joins them."""
