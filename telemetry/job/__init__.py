"""What several processes of a job know of one another beyond their node."""
