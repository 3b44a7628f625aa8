"""Weighted mixtures of sources, each with its own order, epochs and saved position."""
