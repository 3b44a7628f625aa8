import os
import socket
import subprocess
import sys
import textwrap
import types
import warnings

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh

import meshwright as mw
from meshwright.mesh.build import arrange_devices
from meshwright.mesh.string import parse_mesh

# --- Meshes on devices ---


@pytest.mark.parametrize(
    ("arguments", "shape"),
    [
        ((), {"dp": 1, "fsdp": 8, "tp": 1, "sp": 1}),
        (((2, -1, 2, 1),), {"dp": 2, "fsdp": 2, "tp": 2, "sp": 1}),
        (((2, 4), ("x", "y")), {"x": 2, "y": 4}),
        ((np.array([2, 4]), ["x", "y"]), {"x": 2, "y": 4}),
        (("dp:2,fsdp:-1,tp:2",), {"dp": 2, "fsdp": 2, "tp": 2}),
        (("2,2,-1,1",), {"dp": 2, "fsdp": 2, "tp": 2, "sp": 1}),
        (("y:2,x:-1", ("x", "y")), {"x": 4, "y": 2}),
        (("8", ("x",), "cpu"), {"x": 8}),
        ((parse_mesh("a:4,b:-1"),), {"a": 4, "b": 2}),
    ],
)
def test_create_mesh(arguments, shape):
    mesh = mw.create_mesh(*arguments)
    assert isinstance(mesh, Mesh)
    assert dict(mesh.shape) == shape
    assert list(mesh.shape) == list(shape)
    assert set(mesh.devices.flat) == set(jax.devices())
    assert mesh.axis_types == (AxisType.Auto,) * len(shape)


@pytest.mark.parametrize(
    ("axis_types", "expected"),
    [
        (AxisType.Explicit, (AxisType.Explicit,) * 2),
        ((AxisType.Auto, AxisType.Explicit), (AxisType.Auto, AxisType.Explicit)),
    ],
)
def test_axis_types(axis_types, expected):
    assert mw.create_mesh("a:2,b:4", axis_types=axis_types).axis_types == expected
    assert mw.create_abstract_mesh("a:2,b:4", axis_types=axis_types).axis_types == expected


def test_plain_order_is_the_order_given():
    devices = jax.devices()[::-1]
    assert mw.create_mesh("!a:2,b:4", devices=devices).devices.flatten().tolist() == devices
    assert mw.get_jax_mesh("!b:4,a:2", ("a", "b")).devices.flatten().tolist() == jax.devices()


@pytest.mark.parametrize(
    ("text", "names", "shape"),
    [("dp:2,fsdp:-1", ("dp", "fsdp"), (2, 4)), ("fsdp:-1,dp:2", ("dp", "fsdp"), (2, 4)), ("4,2", ("x", "y"), (4, 2))],
)
def test_get_jax_mesh(text, names, shape):
    mesh = mw.get_jax_mesh(text, names)
    assert mesh.axis_names == names
    assert mesh.devices.shape == shape


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"devices": 9}, r"devices=9 is out of range; 8 are available\.\nhint: use 1 to 8"),
        ({"devices": 0}, "devices=0 is out of range"),
        ({"devices": []}, "at least one device"),
        ({"devices": "twice"}, "no device twice"),
        ({"backend": "abacus"}, "no devices found for backend 'abacus'"),
        ({"backend": "gpu", "devices": "all"}, "does not belong to backend 'gpu'"),
        ({"axis_types": (AxisType.Auto,) * 3}, r"3 axis types for 1 axes\.\nhint: pass one type, or one per axis"),
    ],
)
def test_unusable_devices(options, text):
    stand_ins = {"twice": [jax.devices()[0]] * 2, "all": jax.devices()}
    options = {key: stand_ins.get(value, value) if isinstance(value, str) else value for key, value in options.items()}
    with pytest.raises(mw.MeshError, match=text):
        mw.create_mesh("dp:-1", **options)


def test_devices_must_belong_to_the_backend():
    assert mw.create_mesh("dp:-1", backend="cpu", devices=jax.devices()[:2]).size == 2


# --- Abstract meshes ---


def test_abstract_mesh_needs_no_device(monkeypatch):
    monkeypatch.setattr(jax, "devices", None)
    mesh = mw.create_abstract_mesh("dp:16@dcn,fsdp:-1,tp:8", num_devices=4096)
    assert isinstance(mesh, AbstractMesh)
    assert dict(mesh.shape) == {"dp": 16, "fsdp": 32, "tp": 8}
    assert dict(mw.create_abstract_mesh((2, 3), ("a", "b")).shape) == {"a": 2, "b": 3}


def test_abstract_mesh_needs_sizes_or_num_devices():
    with pytest.raises(
        mw.MeshError, match=r"'dp:2,tp:-1' has a size of -1.*\nhint: write the size, or pass num_devices"
    ):
        mw.create_abstract_mesh("dp:2,tp:-1")
    with pytest.raises(mw.MeshError, match="a=2 x b=2 needs 4 devices, but there are 8"):
        mw.create_abstract_mesh("a:2,b:2", num_devices=8)


# --- Hybrid meshes, on fake devices ---


def paper_devices(num_processes, each, *, slices=None, shuffled=False):
    devices = []
    for index in range(num_processes * each):
        device = types.SimpleNamespace(
            id=index, process_index=index // each, platform="gpu", device_kind="paper", local_hardware_id=index % each
        )
        if slices is not None:
            device.slice_index = device.process_index * slices // num_processes
        devices.append(device)
    return devices[::-1] if shuffled else devices


def along(grid, axis, attribute):
    """Returns the largest number of different values of an attribute along one axis."""
    lines = np.moveaxis(grid, axis, -1).reshape(-1, grid.shape[axis])
    return max(len({getattr(device, attribute) for device in line}) for line in lines)


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize(
    ("text", "slices", "granule", "attribute", "crossings"),
    [
        ("dp:4@dcn,tp:4", None, None, "process_index", (4, 1)),
        ("dp:4@dcn,tp:4", 4, None, "slice_index", (4, 1)),
        ("dp:2@dcn,fsdp:4,tp:2", 2, None, "slice_index", (2, 1, 1)),
        ("dp:2@dcn,fsdp:4,tp:2", 2, False, "slice_index", (2, 1, 1)),
        ("dp:4@dcn,fsdp:2,tp:2", 2, True, "process_index", (4, 1, 1)),
        ("dp:8@dcn=4,tp:2", None, None, "process_index", (4, 1)),
        ("dp:2@dcn,fsdp:4@dcn=2,tp:2", None, None, "process_index", (2, 2, 1)),
        ("tp:4,dp:4@dcn", None, None, "process_index", (1, 4)),
        ("!dp:4@dcn,tp:4", None, None, "process_index", (4, 1)),
    ],
)
def test_only_dcn_axes_cross_the_slow_network(text, slices, granule, attribute, crossings, shuffled):
    devices = paper_devices(4, 4, slices=slices, shuffled=shuffled)
    spec = parse_mesh(text).resolve(16)
    grid = arrange_devices(spec, devices, process_is_granule=granule)
    assert grid.shape == spec.sizes
    assert sorted(device.id for device in grid.flat) == list(range(16))
    assert tuple(along(grid, axis, attribute) for axis in range(grid.ndim)) == crossings


def test_dcn_sizes_must_match_the_number_of_domains():
    devices = paper_devices(4, 4)
    text = r"@dcn axes \(dp=2\) make 2 groups, but the devices form 4 processes\.\nhint: .* product is 4"
    with pytest.raises(mw.MeshError, match=text):
        arrange_devices(parse_mesh("dp:2@dcn,tp:8"), devices)
    with pytest.raises(mw.MeshError, match=r"make 4 groups, but the devices form 2 slices"):
        arrange_devices(parse_mesh("dp:4@dcn,tp:4"), paper_devices(4, 4, slices=2))


def test_meshes_that_do_not_fit_the_topology_are_errors(monkeypatch):
    from jax.experimental import mesh_utils

    def refuse(*args, **kwargs):
        raise NotImplementedError("no such torus")

    monkeypatch.setattr(mesh_utils, "create_device_mesh", refuse)
    with pytest.raises(mw.MeshError, match=r'dp:2,tp:4 does not fit .* 8 devices: no such torus\nhint: .*"!dp:2,tp:4"'):
        mw.create_mesh("dp:2,tp:4")
    assert mw.create_mesh("!dp:2,tp:4").size == 8


@pytest.mark.parametrize(
    ("text", "slices", "granule", "warned"),
    [
        ("dp:2,tp:8", None, None, ["tp"]),
        ("dp:4,tp:4", None, None, []),
        ("tp:4,dp:4", None, None, ["tp"]),
        ("dp:16,tp:1", None, None, []),
        ("dp:4@dcn,tp:4", None, None, []),
        ("tp:4@dcn,dp:4", None, None, ["tp"]),
        ("tensor:16", 1, None, []),  # hosts inside one slice are joined by fast links
        ("tensor:16", 1, True, ["tensor"]),
        ("tp:8,sp:2", 2, None, ["tp"]),
        ("tp:2,sp:8", 2, None, ["tp"]),
        ("data:2,model:8", 4, None, ["model"]),
    ],
)
def test_latency_bound_axes_that_span_hosts_cause_a_warning(text, slices, granule, warned):
    from meshwright.mesh import build as mesh

    devices = paper_devices(4, 4, slices=slices)
    spec = parse_mesh(text).resolve(16)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mesh._warn_if_latency_bound_axes_span_hosts(spec, mesh._domains(devices, granule)[0])
    assert [str(item.message).split("'")[1] for item in caught] == warned
    assert all(item.category is mw.MeshwrightWarning for item in caught)


# --- initialize_mesh ---

CONFIG = {
    "data_axis_name": "dp", "data_axis_size": -1, "fsdp_axis_name": "fsdp", "fsdp_axis_size": 2,
    "pipeline_axis_name": "pp", "pipeline_axis_size": 1, "model_axis_name": "tp", "model_axis_size": 2,
}  # fmt: skip


@pytest.mark.parametrize("config", [CONFIG, types.SimpleNamespace(**CONFIG)], ids=["mapping", "object"])
def test_initialize_mesh(config):
    mesh = mw.initialize_mesh(config)
    assert list(mesh.shape.items()) == [("dp", 2), ("fsdp", 2), ("pp", 1), ("tp", 2)]


@pytest.mark.parametrize("shape", [(8,), (2, 2, 1, 2)])
def test_initialize_mesh_keeps_the_order_of_devices(shape):
    devices = np.array(jax.devices()[::-1]).reshape(shape)
    mesh = mw.initialize_mesh(CONFIG, device_array=devices)
    assert mesh.devices.shape == (2, 2, 1, 2)
    assert mesh.devices.flatten().tolist() == jax.devices()[::-1]


def test_initialize_mesh_names_the_missing_key():
    config = {key: value for key, value in CONFIG.items() if key != "model_axis_size"}
    with pytest.raises(mw.MeshError, match=r"has no 'model_axis_size'\.\nhint: set"):
        mw.initialize_mesh(config)


SRUN = {
    f"SLURM_{name}": value
    for name, value in {"JOB_ID": "77", "STEP_NODELIST": "n[1-4]", "NTASKS": "4", "PROCID": "0", "LOCALID": "0"}.items()
}


@pytest.mark.parametrize(
    ("env", "running", "asked", "starts"),
    [
        (SRUN, False, True, 1),
        (SRUN, True, True, 0),
        (SRUN, False, False, 0),
        (SRUN | {"SLURM_NTASKS": "1"}, False, True, 0),
        ({"SLURM_JOB_ID": "77", "SLURM_NTASKS": "4"}, False, True, 0),  # a batch script, which runs alone
        ({}, False, True, 0),
    ],
)
def test_initialize_mesh_starts_the_runtime_only_if_slurm_started_several_tasks(
    monkeypatch, env, running, asked, starts
):
    calls = []
    for name in [name for name in os.environ if name.startswith(("SLURM_", "OMPI_"))]:
        monkeypatch.delenv(name)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: running)
    monkeypatch.setattr(jax.distributed, "initialize", lambda **kwargs: calls.append(kwargs))
    mw.initialize_mesh(CONFIG, init_distributed_on_slurm=asked)
    assert len(calls) == starts


# --- Two real processes ---

TWO_PROCESSES = """
import sys, warnings
import jax

rank, port = int(sys.argv[1]), sys.argv[2]
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)
jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank)

import numpy as np
import meshwright as mw
from meshwright import P

warnings.simplefilter("error")

# Only dp crosses between the processes.
mesh = mw.create_mesh("tp:4,dp:2@dcn", process_is_granule=True)
owners = [[device.process_index for device in row] for row in mesh.devices]
assert owners == [[0, 1]] * 4, owners

# A tensor axis that spans both causes a warning.
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    mw.create_mesh("dp:1,tp:8", process_is_granule=True)
[item] = caught
assert "axis 'tp' (size 8) spans 2 hosts or slices of 4 devices" in str(item.message), item.message

# Both processes can shard and gather a tree, with padding.
tree = {
    "w": np.arange(64, dtype=np.float32).reshape(8, 8),
    "odd": np.arange(21, dtype=np.float32).reshape(7, 3),
    "ids": np.arange(6, dtype=np.int32),
    "step": np.int32(3),
}
rules = [("w", P("tp", "dp")), ("odd", P("tp")), ("ids", P())]
layout = mw.make_layout(rules, tree, mesh, pad="odd")
placed = layout.shard(tree)
assert not placed["w"].is_fully_addressable
assert {shard.data.shape for shard in placed["w"].addressable_shards} == {(2, 4)}
back = layout.gather(placed)
for name in tree:
    np.testing.assert_array_equal(back[name], tree[name], strict=True)

# Both processes can reshard an array on the mesh.
other = mw.make_layout([("w", P("dp")), (".*", P())], {"w": tree["w"]}, mesh)
moved = other.shard({"w": placed["w"]})
assert {shard.data.shape for shard in moved["w"].addressable_shards} == {(4, 8)}
np.testing.assert_array_equal(other.gather(moved)["w"], tree["w"], strict=True)

# Keys drawn while tracing would differ between processes.
draw = jax.jit(mw.wrap_function_with_rng(jax.random.key(0))(lambda key: jax.random.bits(key)))
try:
    draw()
except mw.RngError as error:
    assert "several processes" in str(error)
else:
    raise AssertionError("no error")
print("ok")
jax.distributed.shutdown()
"""


def test_two_processes():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "OMPI_"))}
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(TWO_PROCESSES), str(rank), str(port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    try:
        outputs = [worker.communicate(timeout=120)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    for worker, output in zip(workers, outputs, strict=True):
        assert worker.returncode == 0, output
        assert output.splitlines()[-1] == "ok" or "\nok\n" in output
