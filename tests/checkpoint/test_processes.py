"""Two processes write one checkpoint; one, two and four read it. A process that cannot write does not block another."""

import json
import socket
import subprocess
import sys
import textwrap

import jax
import numpy as np

import meshwright as mw
from meshwright.checkpoint import Checkpoints, read_manifest, verify_step

START = """
import json, os, resource, sys, time
import jax
from jax.experimental import multihost_utils
rank, count, port, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8 // count)
jax.distributed.initialize(
    f"127.0.0.1:{port}", count, rank, coordinator_bind_address=f"127.0.0.1:{port}"
)
import numpy as np
import meshwright as mw
from meshwright.checkpoint import Checkpoints, Keep, peers

mesh = mw.create_mesh(sys.argv[5])
numbers = np.arange(64 * 48, dtype=np.float32).reshape(64, 48)
tree = {"w": numbers, "b": numbers[0], "rng": jax.random.key(7), "n": np.int32(5)}
rules = mw.Rules([("w", mw.P("fsdp", "tp")), ("b|rng|n", mw.P())], optional_axes=("fsdp", "tp"))
layout = mw.make_layout(rules, tree, mesh)

def place(value, sharding):
    if hasattr(value, "dtype") and jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key):
        return jax.jit(lambda: jax.random.key(7), out_shardings=sharding)()
    value = np.asarray(value)
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

def state(step):
    made = jax.tree.map(place, tree, layout.shardings)
    made["w"] = jax.jit(lambda w: w + step, out_shardings=layout.shardings["w"])(made["w"])
    return made

def same(restored):
    for shard in restored.state["w"].addressable_shards:
        np.testing.assert_array_equal(shard.data, (numbers + restored.step)[shard.index])
    np.testing.assert_array_equal(jax.random.key_data(restored.state["rng"]).addressable_shards[0].data,
                                  jax.random.key_data(jax.random.key(7)))
    return True
"""

SAVE = """
checkpoints = Checkpoints(folder)
out = {"first": [checkpoints.save(state(step), step=step, layout=layout, facts={"x": 1}) for step in (1, 2)]}
checkpoints.wait()
out["again"] = checkpoints.save(state(2), step=2, layout=layout, facts={})
plain = peers.hash_files
if rank == 1:
    def fail(*args, **options):
        raise OSError(28, "No space left on device")
    peers.hash_files = fail
checkpoints.save(state(3), step=3, layout=layout, facts={})
checkpoints.wait()
peers.hash_files = plain
out["problems"] = list(checkpoints.problems)
checkpoints.save(state(4), step=4, layout=layout, facts={})
checkpoints.wait()
restored = checkpoints.restore(layout)
out |= {"restored": restored.step, "notes": restored.notes, "same": same(restored)}
# Now Orbax cannot write on one process: the other must not wait for it.
limits = resource.getrlimit(resource.RLIMIT_FSIZE)
if rank == 1:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
began = time.monotonic()
checkpoints.save(state(5), step=5, layout=layout, facts={})
checkpoints.wait()
out["seconds"] = time.monotonic() - began
resource.setrlimit(resource.RLIMIT_FSIZE, limits)
checkpoints.save(state(6), step=6, layout=layout, facts={})
checkpoints.wait()
out |= {"problems": list(checkpoints.problems), "last": checkpoints.restore(layout).step}
print(json.dumps(out), flush=True)
multihost_utils.sync_global_devices("done")
os._exit(0)  # a thread of Orbax waits five minutes for the missing share
"""

LOAD = """
restored = Checkpoints(folder).restore(layout)
print(json.dumps({"restored": restored.step, "notes": restored.notes, "same": same(restored)}), flush=True)
"""


def run_processes(count, code, folder, mesh):
    """Runs a program as several processes of one run; returns the last line of each, parsed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = textwrap.dedent(START) + textwrap.dedent(code)
    children = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(rank), str(count), str(port), str(folder), mesh],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        done = [child.communicate(timeout=150) for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()
    assert [child.returncode for child in children] == [0] * count, [err[-2000:] for _, err in done]
    return [json.loads(out.splitlines()[-1]) for out, _ in done]


def test_two_processes_write_and_one_or_four_read(lab, tmp_path):
    outs = run_processes(2, SAVE, tmp_path, "fsdp:4,tp:2")
    for rank, out in enumerate(outs):
        assert out["first"] == [True, True]
        assert out["again"] is False
        assert out["restored"] == 4
        assert out["notes"] == []
        assert out["same"]
        assert out["last"] == 6
        assert out["seconds"] < 240  # Orbax would wait five minutes
        assert [text.split(":")[0] for text in out["problems"]] == ["could not save step 3", "could not save step 5"], (
            rank
        )
    assert all("process" in text and "could not write its share" in text for text in outs[0]["problems"])
    assert all("the disk is full" in text for text in outs[1]["problems"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "4", "6"]
    manifest = read_manifest(tmp_path / "6")
    assert manifest.mesh_text == "fsdp=4 x tp=2 in 2 processes"
    folders = {name.split("/")[2] for name in manifest.files if "/ocdbt.process_" in name}
    assert folders == {"ocdbt.process_0", "ocdbt.process_1"}, "both wrote their own share"
    assert verify_step(tmp_path / "6") == []
    # One process, on another mesh.
    numbers = np.arange(64 * 48, dtype=np.float32).reshape(64, 48)
    tree = {"w": numbers, "b": numbers[0], "rng": jax.random.key(7), "n": np.int32(5)}
    layout = mw.make_layout([("w", mw.P(None, "tp")), (".*", mw.P())], tree, mw.create_mesh("tp:8"))
    restored = Checkpoints(tmp_path).restore(layout)
    assert lab.bits(restored.state) == lab.bits(tree | {"w": numbers + 6})
    assert restored.notes == ["saved on fsdp=4 x tp=2 in 2 processes, resharded to tp=8"]
    # Four processes, one of which reads the damaged file.
    name = lab.largest(tmp_path / "6")
    lab.flip(name, 100)
    outs = run_processes(4, LOAD, tmp_path, "dp:2,fsdp:2,tp:2")
    for out in outs:
        assert out["restored"] == 4
        assert out["same"]
        assert len(out["notes"]) == 2
        assert (
            f"skipped checkpoint 6, which is damaged: {name.relative_to(tmp_path / '6').as_posix()}" in out["notes"][0]
        )
        assert out["notes"][1].endswith("resharded to dp=2 x fsdp=2 x tp=2 in 4 processes")
