"""The report of a run, read from its log files. Works offline and never imports torch."""
