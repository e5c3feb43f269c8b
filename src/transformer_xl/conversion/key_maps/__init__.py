"""One reversible table per foreign format: its settings, names and layouts on one side, ours on the other."""
