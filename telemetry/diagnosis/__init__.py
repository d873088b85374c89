"""Pure functions that turn figures into causes, verdicts and advice."""
