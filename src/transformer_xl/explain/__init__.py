"""What memory does to a text: per token, per head, and as a page that a person reads."""
