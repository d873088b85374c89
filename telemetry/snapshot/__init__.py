"""Traces: arm, coordinate, capture, store, read."""
