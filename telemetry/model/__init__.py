"""The records that go from room to room, with their units, and sums over time."""
