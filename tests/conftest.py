"""Eight simulated CPU devices, also when this folder is run without the conftest.py above it."""

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
