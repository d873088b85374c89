"""Measures what the agent costs, side by side with other tools: ``make bench``."""
