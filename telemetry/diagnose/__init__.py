"""Pure functions over records: no clock, no I/O, no torch."""
