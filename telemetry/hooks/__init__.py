"""All that runs on the training thread or in a worker."""
