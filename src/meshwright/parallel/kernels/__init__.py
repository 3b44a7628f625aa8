"""Pallas kernels for GPUs, and the choice of where they run."""
