"""What memory does: reach, ablations, learning curves, and a text explained token by token."""
