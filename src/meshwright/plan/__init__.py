"""Plans of a training step before it runs: memory, communication and time on hardware you may not have."""
