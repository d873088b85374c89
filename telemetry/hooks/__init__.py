"""The hooks: they run on the training thread or in a DataLoader worker, and only stamp and store."""
