"""Comparing a mesh to one device: the meshes, and how close is the same. Not a test; test files import it."""

import functools

import numpy as np

import meshwright as mw


@functools.cache
def mesh_of(ways):
    """Data parallelism beside the tensor axis wherever devices are left for it."""
    data = 2 if ways <= 4 else 1
    return mw.create_mesh(f"dp:{data},tp:{ways}", devices=data * ways)


def close(got, true, tolerance, what):
    error = np.abs(np.asarray(got, np.float32) - true).max()
    assert error <= tolerance * max(np.abs(true).max(), 1e-30), (what, error)
