"""Snapshots: short recordings of torch's profiler. When one is taken, by which ranks, and how it is stored."""
