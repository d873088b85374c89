"""What the agent costs, measured side by side with others: ``make bench``."""
