"""``telemetry doctor``: check what works on this machine, and what to do about the rest.

Each small check answers one question. A check that raises becomes a finding itself. A check leaves nothing behind.
"""
