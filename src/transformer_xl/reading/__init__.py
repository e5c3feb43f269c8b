"""How texts are read and scored: in segments or token by token, with the memory of what came before."""
