"""The rows of a batch that each process reads, with processes simulated by groups of devices."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.data import local_rows, place_rows

SHAPES = {"inputs": jax.ShapeDtypeStruct((16, 6), "int32"), "mask": jax.ShapeDtypeStruct((16,), "float32")}


def split(mesh, *spec):
    return jax.tree.map(lambda leaf: NamedSharding(mesh, P(*spec[: leaf.ndim])), SHAPES)


@pytest.mark.parametrize(
    ("mesh", "axes", "num_processes", "shares"),
    [
        ("dp:8", "dp", 1, [range(16)]),
        ("dp:8", "dp", 2, [range(8), range(8, 16)]),
        ("dp:8", "dp", 8, [range(2 * n, 2 * n + 2) for n in range(8)]),
        ("fsdp:8", "fsdp", 4, [range(4 * n, 4 * n + 4) for n in range(4)]),
        # Rows that several devices hold, in one process or in two.
        ("dp:2,tp:4", "dp", 2, [range(8), range(8, 16)]),
        ("dp:2,tp:4", "dp", 4, [range(8), range(8), range(8, 16), range(8, 16)]),
        ("dp:2,fsdp:2,tp:2", ("dp", "fsdp"), 2, [range(8), range(8, 16)]),
        # The inner axis splits the rows, so each process holds rows from all over the batch.
        ("tp:2,dp:4", "dp", 4, [[*range(8)], [*range(8, 16)], [*range(8)], [*range(8, 16)]]),
        ("tp:8", None, 2, [range(16), range(16)]),
    ],
)
def test_rows_of_a_process(mesh, axes, num_processes, shares):
    mesh = mw.create_mesh(mesh)
    devices = mesh.devices.reshape(num_processes, -1)
    for mine, share in zip(devices, shares, strict=True):
        assert local_rows(SHAPES, split(mesh, axes), devices=mine).tolist() == list(share)


def test_rows_that_are_not_contiguous():
    mesh = mw.create_mesh("dp:8")
    share = local_rows(SHAPES, split(mesh, "dp"), devices=[mesh.devices[1], mesh.devices[6]])
    assert share.tolist() == [2, 3, 12, 13]


@pytest.mark.parametrize("spec", [("dp",), ("dp", "tp"), (None, "tp"), (), (("dp", "tp"),)])
def test_arrays_from_rows(spec, assert_placed):
    mesh = mw.create_mesh("dp:4,tp:2")
    values = {"inputs": np.arange(96, dtype=np.int32).reshape(16, 6), "mask": np.arange(16, dtype=np.float32)}
    shardings = split(mesh, *spec)
    arrays = place_rows(values, local_rows(SHAPES, shardings), SHAPES, shardings)
    for name, array in arrays.items():
        assert_placed(array, mesh, shardings[name].spec, values[name])


def test_arrays_from_the_rows_of_one_process(monkeypatch):
    # A process that holds rows 2, 3, 12 and 13 provides them to its devices.
    asked = {}

    def from_callback(shape, sharding, part):
        for device, index in sharding.devices_indices_map(shape).items():
            if device.id in (1, 6):
                asked[device.id] = part(index)
        return asked

    monkeypatch.setattr(jax, "make_array_from_callback", from_callback)
    mesh = mw.create_mesh("!dp:8")
    numbers = np.array([2, 3, 12, 13])
    values = np.repeat(numbers[:, None], 6, axis=1)
    place_rows(values, numbers, SHAPES["inputs"], NamedSharding(mesh, P("dp")))
    assert {device: rows[:, 0].tolist() for device, rows in asked.items()} == {1: [2, 3], 6: [12, 13]}


def test_scalars_have_no_rows():
    mesh = mw.create_mesh("dp:8")
    shapes = {"x": jax.ShapeDtypeStruct((8,), "int32"), "scale": jax.ShapeDtypeStruct((), "float32")}
    shardings = {"x": NamedSharding(mesh, P("dp")), "scale": NamedSharding(mesh, P())}
    assert local_rows(shapes, shardings, devices=[mesh.devices[3]]).tolist() == [3]
    assert local_rows(shapes["scale"], shardings["scale"]).tolist() == []
    placed = place_rows({"x": np.arange(8, dtype=np.int32), "scale": np.float32(2)}, np.arange(8), shapes, shardings)
    assert (placed["scale"].shape, float(placed["scale"])) == ((), 2.0)
