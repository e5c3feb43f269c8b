"""What a model costs: operations, bytes and time, counted on paper and measured on a machine."""
