"""What to change for each cause, and what it is worth."""
