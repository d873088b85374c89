"""Every metric of the endpoint, declared once. The exposition and docs/METRICS.md are made from this table."""
