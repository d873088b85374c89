"""Polled sources: one file each, one importer per third-party library."""
