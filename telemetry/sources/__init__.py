"""What the agent thread polls, one file for each source."""
