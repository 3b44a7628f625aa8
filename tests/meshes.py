"""Meshes and arrays that several test modules share."""

import contextlib
import warnings

import numpy as np
from jax.sharding import AxisType

import meshwright as mw

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


def mesh(axis_types=AUTO):
    return mw.create_mesh("dp:4,tp:2", axis_types=axis_types)


def host(*shape, dtype=np.float32):
    return np.arange(np.prod(shape), dtype=dtype).reshape(shape)


@contextlib.contextmanager
def legacy(mesh):
    """Enters `with mesh:`, which newer JAX deprecates but much code still uses."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        mesh.__enter__()
    try:
        yield
    finally:
        mesh.__exit__(None, None, None)
