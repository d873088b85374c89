"""Reads traces of torch.profiler. It needs neither torch nor numpy."""
