"""Lossless compression of any file by a model that learns while it reads: `txl compress`, `txl decompress`."""
