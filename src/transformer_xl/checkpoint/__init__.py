"""Checkpoints of a run: saved so that a kill, a full disk or a flipped bit never costs more than one interval."""
