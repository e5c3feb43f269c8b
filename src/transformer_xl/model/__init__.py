"""Models: the paper's equation, its memory, and what is built on them. One model a file; nothing here trains or reads files."""
