"""Callbacks for training frameworks. Each file is imported by the script that uses it, and by nothing else."""
