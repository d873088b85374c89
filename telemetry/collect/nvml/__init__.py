"""This rank's GPU through NVML."""
