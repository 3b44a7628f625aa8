"""Pipeline schedules and the engine that runs them."""
