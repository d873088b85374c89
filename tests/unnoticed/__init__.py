"""What an always-on agent must never do to a training script: pairs of runs, bare and under the agent."""
