"""What runs on the training thread, or in a DataLoader worker: hooks that stamp and store."""
