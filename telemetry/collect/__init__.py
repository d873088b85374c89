"""Collectors, one file each. They run on the agent thread."""
