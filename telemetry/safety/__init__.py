"""What keeps the training from noticing the agent."""
