"""Steps compiled for a target: running the compiler, reading its program, and judging its collectives."""
