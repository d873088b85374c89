"""``telemetry doctor``: what would work here, and why not.

A list of small checks, each of which finds one thing out and is contained: a check that fails is itself a finding.
Nothing that a check makes is left behind.
"""
