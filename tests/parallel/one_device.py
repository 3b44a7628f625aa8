"""Meshes and tolerances for comparisons with one device. Imported by tests."""

import functools

import numpy as np

import meshwright as mw


@functools.cache
def mesh_of(ways):
    """Adds a data axis to the tensor axis if enough devices are left."""
    data = 2 if ways <= 4 else 1
    return mw.create_mesh(f"dp:{data},tp:{ways}", devices=data * ways)


def close(got, true, tolerance, what):
    error = np.abs(np.asarray(got, np.float32) - true).max()
    assert error <= tolerance * max(np.abs(true).max(), 1e-30), (what, error)
