"""Training scripts with one known cause of a stall each, and healthy ones: what the agent says of them is judged."""
