"""What is polled on the agent thread, one file each."""
