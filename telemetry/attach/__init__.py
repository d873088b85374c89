"""The only code that runs on the training thread."""
