"""From evidence to causes and advice: pure functions, without a clock, files or torch."""
