"""Seeing a program before it runs: what it was compiled to, for machines that are here or not."""
