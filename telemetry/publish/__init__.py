"""Sinks: each isolated, none can stop another."""
