"""What the nodes of a job know about each other."""
