"""Advice for each cause: what to change, and the predicted speed-up."""
