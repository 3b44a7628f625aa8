"""Snapshots of the state in host memory, which outlive the processes that took them."""

from meshwright.checkpoint.snapshot.snapshots import Snapshots

__all__ = ["Snapshots"]
