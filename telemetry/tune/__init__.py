"""``telemetry tune``: finds better DataLoader settings with short trials of the unchanged script."""
