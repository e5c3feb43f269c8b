"""Training: the state and the step, the optimizers and their schedule, the record of a run, and the loop that joins them."""
