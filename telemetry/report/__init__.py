"""Offline: reads the log files of a run; never imports torch."""
