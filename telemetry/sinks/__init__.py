"""The sinks: they get the figures, besides the log and the endpoint."""
