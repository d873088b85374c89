"""``telemetry demo``: a training script that starves, and what the agent measures."""
