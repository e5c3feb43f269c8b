"""Variants of recipes trained at equal budget, scored, and compared in one table."""
