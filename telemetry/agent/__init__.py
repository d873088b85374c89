"""The agent thread: its parts, and what it does at each tick."""
