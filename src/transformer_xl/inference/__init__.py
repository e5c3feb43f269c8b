"""Reading with weights that no longer change: keys and values are kept, and layers are arranged for one token or a segment."""
