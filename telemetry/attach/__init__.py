"""Runs on the training thread and in the DataLoader workers. So does `snapshot.capture`, on the training thread."""
