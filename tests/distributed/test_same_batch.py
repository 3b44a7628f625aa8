"""Two real processes: a batch that depends on the host is found by `verify`, by a step and at the start of `train`."""

import json
import os
import socket
import subprocess
import sys
import textwrap

import numpy as np
import pytest

import meshwright as mw
from meshwright.distributed.same_batch import content_digest, require_same_batch

JOB = """
    import jax, jax.numpy as jnp, numpy as np, os
    import meshwright as mw
    from meshwright import P

    def loss(params, batch, rng):
        return jnp.mean((batch["x"] @ params["w"] - 1) ** 2), {}

    def make_batch(seed):
        rank = jax.process_index() if os.environ.get("BY_RANK") else 0  # the mistake
        return {"x": np.random.default_rng(seed + rank).standard_normal((8, 4)).astype(np.float32)}

    job = mw.Job(
        init=lambda key: {"w": jax.random.normal(key, (4,))},
        rules=mw.Rules([("w", P("tp"))], optional_axes=("tp",)),
        loss=loss,
        batch={"x": jax.ShapeDtypeStruct((8, 4), "float32")},
        make_batch=make_batch,
    )
"""
PROGRAM = """
    import json, os, sys
    import jax, numpy as np, optax
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    import meshwright as mw
    from meshwright.distributed import join
    from meshwright.loop import run
    from meshwright.loop.settings.config import TrainConfig

    address, rank, where = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    join(address, 2, rank, timeout=60)
    job = mw.load_job(f"{where}/host_job.py:job")
    told = {}

    def case(name, act):
        try:
            told[name] = act()
        except mw.MeshwrightError as error:
            told[name] = f"{type(error).__name__}: {error}"

    def one_step(mesh, make):
        layout = mw.state_layout(job, optax.sgd(0.1), mw.create_mesh(mesh))
        state = mw.init_state(job, optax.sgd(0.1), layout, jax.random.key(0))
        step = mw.make_train_step(job, optax.sgd(0.1), layout, view="global")
        _, metrics = step(state, make(step))
        return float(metrics["loss"])

    def placed(step):
        # Both processes hold all rows, because the mesh splits them over `dp`, which lies inside each.
        batch = job.make_batch(0)
        split = step.batch_shardings(batch)
        return jax.tree.map(
            lambda leaf, sharding: jax.make_array_from_callback(leaf.shape, sharding, leaf.__getitem__), batch, split
        )

    def train(name):
        options = {"job": f"{where}/host_job.py:job", "run": f"{where}/{name}", "steps": 1, "mesh": "dp:4",
                   "report": False, "tensorboard": False, "hang": 0.0, "warmup": 0, "eval_every": 0}
        return run.train(TrainConfig().changed(options), say=lambda *args: None).why

    for name in ("", "by rank, "):
        os.environ["BY_RANK"] = name
        case(f"{name}verify", lambda: str(mw.verify(job)))
        case(f"{name}same rows", lambda: one_step("dp:4", lambda step: job.make_batch(0)))
        case(f"{name}own rows", lambda: one_step("dp:4", placed))
        case(f"{name}copied rows", lambda: one_step("tp:2,dp:2", placed))
        case(f"{name}train", lambda: train(name.split(",")[0].replace(" ", "-") or "run"))
    print("TOLD" + json.dumps(told), flush=True)
    os._exit(0)
"""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """The outcomes of two processes."""
    where = tmp_path_factory.mktemp("hosts")
    (where / "host_job.py").write_text(textwrap.dedent(JOB))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    args = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(PROGRAM), address]
    started = [
        subprocess.Popen([*args, str(rank), str(where)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=200)[0] for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
            process.stdout.close()
    lines = [[line for line in text.splitlines() if line.startswith("TOLD")] for text in said]
    assert all(lines), "\n".join(said)
    return [json.loads(found[0][4:]) for found in lines]


def test_equal_batches_and_own_rows_are_accepted(ranks):
    for told in ranks:
        assert "verify needs a single process, but there are 2" in told["verify"]
        assert told["same rows"] == pytest.approx(told["own rows"], rel=1e-6)
        assert told["same rows"] == pytest.approx(told["copied rows"], rel=1e-6)
        assert told["train"] == "finished"
        assert isinstance(told["by rank, own rows"], float)  # the rows of each process are its own


@pytest.mark.parametrize(("case", "who"), [("verify", "verify"), ("same rows", "step"), ("copied rows", "step")])
def test_a_batch_that_depends_on_the_host_is_found(ranks, case, who):
    for told in ranks:
        text = told[f"by rank, {case}"]
        assert text.startswith(f"DataError: {who}: the batch differs between processes: `x`")
        assert "on rank 1 of 2 is not that of rank 0" in text
        assert "hint: draw the same global batch on every process" in text


def test_training_does_not_start_on_a_batch_that_depends_on_the_host(ranks):
    for told in ranks:
        assert (
            "the processes of this run differ in `make_batch(0), drawn by each`: rank 1 of 2" in told["by rank, train"]
        )


def test_a_job_whose_batch_changes_each_time():
    draws = iter(range(9))
    job = mw.Job(
        init=lambda key: {"w": np.ones(4, np.float32)},
        rules=[("w", mw.P())],
        loss=lambda params, batch, rng: (params["w"].sum(), {}),
        make_batch=lambda seed: {"x": np.full(8, next(draws), np.float32)},
    )
    with pytest.raises(mw.DataError, match=r"(?s)`make_batch` returns another batch each time.*hint: draw"):
        mw.verify(job)


def test_one_process_agrees_with_itself():
    require_same_batch({"x": np.arange(3)}, who="test")
    assert content_digest({"x": np.arange(3)}) != content_digest({"y": np.arange(3)})
    assert content_digest({"x": np.arange(3)}) != content_digest({"x": np.arange(3).astype(np.float32)})
    assert os.environ.get("BY_RANK") is None
