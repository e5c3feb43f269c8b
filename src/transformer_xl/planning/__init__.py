"""What a run will need, on paper: memory, operations, bytes between machines, time."""
