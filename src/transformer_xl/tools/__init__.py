"""What a person asks of runs: how variants compare, how losses look, what a run will need, and how fast a model is."""
