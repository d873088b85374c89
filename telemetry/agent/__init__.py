"""The agent thread: what it does once a tick, and with what."""
