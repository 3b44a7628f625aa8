"""Logs, trackers, progress, memory and profiles of a run."""
