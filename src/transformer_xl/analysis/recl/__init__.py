"""Relative effective context length: how far back a group of models makes use of a text."""
