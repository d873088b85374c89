"""Scripts with a planted hot line: whether the agent names it, its share, and what removing it brings."""
