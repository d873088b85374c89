"""Snapshots: short recordings of torch's profiler, the ranks' agreement on them, and their files."""
