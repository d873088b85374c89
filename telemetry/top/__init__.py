"""The command ``telemetry top``: a live view of a run in a terminal."""
