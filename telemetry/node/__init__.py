"""What the processes of a job know of each other."""
