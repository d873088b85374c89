"""From records to causes and advice: no clock, no I/O, no torch."""
