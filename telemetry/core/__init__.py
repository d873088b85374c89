"""Records, names and helpers that every other folder may import."""
