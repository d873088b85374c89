"""What is read on the agent thread: collectors, one file each, and what they read with."""
