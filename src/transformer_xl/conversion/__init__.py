"""Other people's checkpoints: recognized, read without executing anything, and written in the native form; and back."""
