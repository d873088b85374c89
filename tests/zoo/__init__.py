"""Training scripts with one known cause of a stall each, and healthy ones. The agent's reports on them are judged."""
