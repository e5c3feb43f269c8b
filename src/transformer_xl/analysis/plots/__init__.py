"""Curves of several runs: while they learn, by memory length, by position in the segment."""
