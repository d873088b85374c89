"""Finds causes and advice from records. Uses no clock, no I/O and no torch."""
