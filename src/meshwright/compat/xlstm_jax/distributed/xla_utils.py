"""Drop-in for `xlstm_jax.distributed.xla_utils`: settings that JAX reads only when it starts."""

from meshwright.mesh.simulate import set_XLA_flags, simulate_cpu_devices

__all__ = ["set_XLA_flags", "simulate_CPU_devices"]


def simulate_CPU_devices(device_count: int = 8) -> None:
    """Makes JAX simulate devices on the CPU; raises if JAX has already started with other devices.

    Example:
        >>> simulate_CPU_devices(8)
    """
    simulate_cpu_devices(device_count)
