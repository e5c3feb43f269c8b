"""How runs are read for a comparison, and with what attention length."""
