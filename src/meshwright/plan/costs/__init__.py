"""Memory, communication and time of a step, by arithmetic."""
