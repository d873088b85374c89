"""The report of a run as one HTML file: ``telemetry report RUN_DIR --html FILE``."""
