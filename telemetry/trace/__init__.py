"""Reads traces of torch.profiler. Imports nothing of this package but `core`."""
