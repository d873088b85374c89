"""`telemetry compare`: whether one run is faster than another, and why."""
