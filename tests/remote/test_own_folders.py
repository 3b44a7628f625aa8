"""Two real processes without a shared folder: each keeps its shards, and the store has all of them."""

import json
import os
import socket
import subprocess
import sys
import textwrap

import jax
import numpy as np
import pytest

import meshwright as mw
from meshwright.checkpoint import DurableSteps, TieredCheckpoints
from meshwright.remote import open_store

START = """
import json, os, shutil, sys
from pathlib import Path
import jax
from jax.experimental import multihost_utils
rank, port, url, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3], Path(sys.argv[4]) / f"rank-{sys.argv[1]}"
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)
jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank, coordinator_bind_address=f"127.0.0.1:{port}")
import numpy as np
import meshwright as mw
from meshwright.checkpoint import DurableSteps, TieredCheckpoints, peers
from meshwright.errors import StoreError
from meshwright.remote import open_store

numbers = np.arange(60 * 44, dtype=np.float32).reshape(60, 44)
tree = {"w": numbers, "b": numbers[0], "rng": jax.random.key(7), "n": np.int32(5)}

def make_layout(mesh, **specs):
    rules = mw.Rules([("w", mw.P("fsdp", "tp")), ("b", mw.P("fsdp")), ("rng|n", mw.P())], optional_axes=("fsdp", "tp"))
    return mw.make_layout(rules, tree, mw.create_mesh(mesh))

layout, other = make_layout("fsdp:4,tp:2"), make_layout("dp:4,tp:2")

def place(value, sharding):
    if hasattr(value, "dtype") and jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key):
        return jax.jit(lambda: jax.random.key(7), out_shardings=sharding)()
    value = np.asarray(value)
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

def state(step):
    made = jax.tree.map(place, tree, layout.shardings)
    made["w"] = jax.jit(lambda w: w + step, out_shardings=layout.shardings["w"])(made["w"])
    return made

def open_tiers(**options):
    durable = DurableSteps(open_store(url, writes=True), every=2)
    return TieredCheckpoints(folder, durable=durable, shared=False, keep_local=2, **options)

def restore(checkpoints, layout):
    restored = checkpoints.restore(layout)
    for shard in restored.state["w"].addressable_shards:
        np.testing.assert_array_equal(shard.data, (numbers + restored.step)[shard.index])
    for shard in restored.state["b"].addressable_shards:
        np.testing.assert_array_equal(shard.data, numbers[0][shard.index])
    np.testing.assert_array_equal(jax.random.key_data(restored.state["rng"]).addressable_shards[0].data,
                                  jax.random.key_data(jax.random.key(7)))
    return [restored.step, restored.notes, sorted(p.name for p in (folder / str(restored.step) / "state/w").iterdir())]

def save(checkpoints, *steps):
    for step in steps:
        checkpoints.save(state(step), step=step, layout=layout, facts={"x": step})
    checkpoints.close()
    multihost_utils.sync_global_devices("process 0 has finished the last upload")
"""

STEPS = """
out = {}
checkpoints = open_tiers()
save(checkpoints, 1, 2, 3)
out["steps"], out["durable"] = checkpoints.steps(), checkpoints.durable_steps()
out["newest"] = restore(open_tiers(), layout)  # step 3 is in no store
# Another mesh needs shards that this process does not hold: they go through the store.
out["other mesh"] = restore(open_tiers(), other)
multihost_utils.sync_global_devices("before the damage")
if rank == 0:
    open_tiers().durable.remove(3)
# One process lost its disk, and the other has a flipped bit: missing files are fetched.
if rank == 1:
    shutil.rmtree(folder / "2")
else:
    data = bytearray((folder / "2/state/w/0.0").read_bytes())
    data[-1] ^= 1
    (folder / "2/state/w/0.0").write_bytes(data)
shutil.rmtree(folder / "3")
multihost_utils.sync_global_devices("after the damage")
out["lost"] = restore(open_tiers(), layout)
save(checkpoints, 5)
if rank == 1:
    shutil.rmtree(folder / "5")
out["last"] = restore(open_tiers(), layout)
shutil.rmtree(folder / "5", ignore_errors=True)
# A process that cannot do its share of a save or an upload blocks nobody, and nothing is finished.
checkpoints = open_tiers()
plain = peers.hash_files
if rank == 1:
    def fail(*args, **options):
        raise OSError(28, "No space left on device")
    peers.hash_files = fail
save(checkpoints, 4)
peers.hash_files = plain
upload = DurableSteps.upload
if rank == 1:
    def refuse(*args):
        raise StoreError("the bucket is gone")
    DurableSteps.upload = refuse
save(checkpoints, 6)
DurableSteps.upload = upload
out["problems"] = checkpoints.problems
out["after"] = [checkpoints.steps(), checkpoints.durable_steps()]
checkpoints.make_durable(6)
multihost_utils.sync_global_devices("process 0 has finished the upload")
out["made durable"] = [checkpoints.durable_steps(), checkpoints.problems[2:]]
save(checkpoints, 8)
print(json.dumps(out), flush=True)
multihost_utils.sync_global_devices("done")
"""


def run_pair(*arguments, env=(None, None)):
    """Runs a command as both processes; returns what they print."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    children = [
        subprocess.Popen(
            [item.format(rank=rank, port=port) for item in arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env[rank],
        )
        for rank in range(2)
    ]
    try:
        done = [child.communicate(timeout=200) for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()
    return [(child.returncode, *texts) for child, texts in zip(children, done, strict=True)]


@pytest.mark.parametrize("url", ["s3"], indirect=True)
def test_processes_without_a_shared_folder_save_and_restore(url, tmp_path):
    program = (START + textwrap.dedent(STEPS)).replace("{", "{{").replace("}", "}}")
    done = run_pair(sys.executable, "-W", "ignore", "-c", program, "{rank}", "{port}", url, str(tmp_path))
    assert [code for code, _, _ in done] == [0, 0], [said[-3000:] for *_, said in done]
    first, second = (json.loads(out.splitlines()[-1]) for _, out, _ in done)
    for rank, out in enumerate((first, second)):
        own = [".zarray", *(f"{row}.{col}" for row in ((0, 1), (2, 3))[rank] for col in (0, 1))]
        assert out["steps"] == [2, 3]
        assert out["durable"] == [2]
        assert out["newest"] == [3, [], own]
        step, notes, held = out["other mesh"]
        assert (step, len(held)) == (3, 9)
        assert notes == ["saved on fsdp=4 x tp=2 in 2 processes, resharded to dp=4 x tp=2 in 2 processes"]
        assert out["lost"] == [2, [], own]
        assert out["last"][0] == 2
        assert "skipped checkpoint 5, which is damaged: state/" in out["last"][1][0]
        assert [text.split(":")[0] for text in out["problems"]] == ["could not save step 4", "could not upload step 6"]
        assert out["after"] == [[2, 6], [2]]
        assert out["made durable"] == [[2, 6], []]
    assert "process 1 of this run could not do its share: the disk is full" in first["problems"][0]
    assert "process 1 of this run could not do its share: StoreError: the bucket is gone" in first["problems"][1]
    # One process reads the whole step from the store.
    durable = DurableSteps(open_store(url))
    assert durable.problems(8) == []
    numbers = np.arange(60 * 44, dtype=np.float32).reshape(60, 44)
    tree = {"w": numbers, "b": numbers[0], "rng": jax.random.key(7), "n": np.int32(5)}
    layout = mw.make_layout([("w", mw.P(None, "tp")), (".*", mw.P())], tree, mw.create_mesh("tp:4,dp:2"))
    restored = TieredCheckpoints(tmp_path / "alone", durable=durable).restore(layout)
    assert restored.step == 8
    np.testing.assert_array_equal(restored.state["w"], numbers + 8)


JOB = """
import numpy as np, jax, jax.numpy as jnp, meshwright as mw

def make_batch(seed):
    return {"x": np.random.default_rng(seed).normal(size=(8, 16)).astype(np.float32)}

def init(key):
    return {"w": jax.random.normal(key, (16, 24)) / 4, "b": jnp.zeros(24)}

def loss(params, batch, rng):
    return ((jnp.tanh(batch["x"] @ params["w"] + params["b"]).sum(axis=-1) - 1) ** 2).mean(), {}

rules = [("w", mw.P("fsdp", "tp")), ("b", mw.P("tp"))]
job = mw.Job(init=init, loss=loss, rules=rules, mesh="fsdp:4,tp:2", batch=make_batch(0), make_batch=make_batch)
"""
# The folder of process 0 is on the same machine here, so process 1 must not look.
BLIND = """
import os, signal, sys, time
from pathlib import Path
import meshwright.loop.folder.remote_run as remote_run
remote_run._sees = lambda folder, written: {rank} == 0

def die(self, loop):
    if {rank} == 1 and loop.number == int(os.environ["DIES_AT"]):
        while len([*Path(os.environ["HOSTS"]).glob("host-*/meshwright/runs/*/checkpoints/6/manifest.json")]) < 2:
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGKILL)
    return False

remote_run.HeldLease.after_step = die
from meshwright.cli import main
main(["train", *sys.argv[1:]])
"""


def losses(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def test_a_killed_pair_without_a_shared_folder_resumes_and_one_process_too(tmp_path, monkeypatch):
    (tmp_path / "job.py").write_text(JOB)
    url = f"file://{tmp_path}/store/run"
    options = ["--checkpoint-every", "2", "--no-report", "--no-tensorboard", "--hang", "0", "--ledger"]

    def pair(*more, dies_at=-1):
        place = [
            "--devices",
            "4",
            "--coordinator",
            "127.0.0.1:{port}",
            "--num-processes",
            "2",
            "--process-id",
            "{rank}",
        ]
        env = [
            {
                **os.environ,
                "JAX_PLATFORMS": "cpu",
                "XDG_CACHE_HOME": f"{tmp_path}/host-{rank}",
                "DIES_AT": str(dies_at),
                "HOSTS": str(tmp_path),
            }
            for rank in range(2)
        ]
        command = [sys.executable, "-W", "ignore", "-c", BLIND, "--run", url, *options, *place, *more]
        return run_pair(*command, env=env)

    shared = ["--job", f"{tmp_path}/job.py:job", "--view", "global", "--schedule", "constant", "--warmup", "0"]
    said = pair(*shared, "--steps", "10", "--upload-every", "4", dies_at=7)
    assert all(code != 0 for code, _, _ in said)
    assert DurableSteps(open_store(f"{url}/checkpoints")).steps() == [4]
    done = pair("--resume", "--steps", "8")
    assert [code for code, _, _ in done] == [0, 0], [texts[-1][-3000:] for texts in done]
    text = "".join(done[0][1:])
    assert "not all processes see this folder" in text
    assert "resumed from step 6" in text  # each process had its part of it
    assert "replacing" not in text
    # One process, elsewhere.
    from meshwright.loop.folder.remote_run import read_remote
    from meshwright.loop.run import train
    from meshwright.loop.settings.config import read_config

    told = []
    config = read_config(tmp_path / "store" / "run" / "config.yaml")
    train(config.changed({"run": url, "resume": True, "steps": 10}), say=told.append)
    assert any("resumed from step 8" in line for line in told)
    folder, checkpoints = read_remote(url)
    assert checkpoints.steps()[-1] == 10
    train(config.changed({"run": str(tmp_path / "alone"), "steps": 10, "upload_every": None}), say=told.append)
    wanted, found = losses(tmp_path / "alone"), losses(folder)
    assert wanted.keys() == found.keys()
    np.testing.assert_allclose([*found.values()], [*wanted.values()], rtol=1e-5)
    done = subprocess.run([sys.executable, "-m", "meshwright", "ledger", str(folder)], capture_output=True, text=True)
    assert done.stdout.startswith("ok: 10 steps"), done.stdout + done.stderr
