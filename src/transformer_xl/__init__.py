"""Transformer-XL: a language model that reads a stream of any length with a memory of fixed size."""

__version__ = "0.1.0"
