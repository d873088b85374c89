"""Sinks: the endpoint and the log. A failure of one does not stop another."""
