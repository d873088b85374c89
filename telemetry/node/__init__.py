"""How the processes of a job find and read each other, and how a node shows its metrics."""
