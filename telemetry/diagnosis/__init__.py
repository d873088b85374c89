"""Pure functions: from figures to causes, verdicts and advice."""
