"""Where the figures go besides the log and the endpoint."""
