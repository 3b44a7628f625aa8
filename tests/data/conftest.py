"""Rows that count their reads, and shardings of batches: the fixture `desk`."""

import threading
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import meshwright as mw


class CountedRows:
    """Row i is filled with i; `reads` lists the rows that were read, in order."""

    def __init__(self, length, fingerprint="counted"):
        self.length = length
        self.fingerprint = fingerprint
        self.reads = []
        self.lock = threading.Lock()

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        with self.lock:
            self.reads.append(int(index))
        return {"inputs": np.full(4, index, np.int32), "weights": np.ones(4, np.float32)}


def shardings_on(mesh, *axes):
    """Returns shardings that split the rows of a batch over the axes of a mesh."""
    mesh = mw.create_mesh(mesh) if isinstance(mesh, str) else mesh
    return lambda batch: jax.tree.map(lambda leaf: NamedSharding(mesh, P(axes)), batch)


def rows_of(batch):
    """Returns the row numbers of a batch, read from its arrays."""
    return np.asarray(batch.arrays["inputs"])[:, 0].tolist()


@pytest.fixture(scope="session")
def desk():
    return SimpleNamespace(
        CountedRows=CountedRows,
        shardings_on=shardings_on,
        rows_of=rows_of,
        # One row per device, and each row on several devices.
        meshes={
            "dp:8": shardings_on("dp:8", "dp"),
            "fsdp:8": shardings_on("fsdp:8", "fsdp"),
            "dp:2,tp:4": shardings_on("dp:2,tp:4", "dp"),
            "dp:1": shardings_on(mw.create_mesh("dp:1", devices=1), "dp"),
        },
    )
