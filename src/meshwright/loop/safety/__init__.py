"""Signals, hangs and rising losses."""
