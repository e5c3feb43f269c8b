"""The server: texts completed, and sessions of constant memory, over HTTP (`txl serve`)."""
