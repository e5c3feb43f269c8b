"""Text to ids and back: one file for each kind of vocabulary."""
