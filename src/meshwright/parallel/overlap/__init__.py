"""Matmuls that overlap their collectives, and the best form for each chip."""
