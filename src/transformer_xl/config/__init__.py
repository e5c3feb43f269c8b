"""Settings: of a model, of a run, and recipes of them."""
