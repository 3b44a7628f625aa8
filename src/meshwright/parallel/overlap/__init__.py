"""Matmuls that hide their collectives: the operations, their form on each chip, and the loops underneath."""
