"""Pipelines: schedules as tables, and the engine that runs them."""
