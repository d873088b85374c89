"""The records that are passed from folder to folder, with their units, and sums over time."""
