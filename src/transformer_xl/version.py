"""The version, by itself, so that nothing has to import the package to know it."""

__version__ = "0.3.0"
