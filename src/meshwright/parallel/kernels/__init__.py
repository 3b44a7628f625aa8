"""Pallas kernels for GPUs."""
