"""Bad inputs 31 to 34: silent failures are reported."""

import dataclasses
import socket
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.distributed.agreement import report_disagreement
from meshwright.train import NonFiniteGuard, fingerprint, init_state, make_train_step, state_layout


def job():
    def init(key):
        return {"a": {"w": jnp.ones(8)}, "b": {"w": jnp.ones(8)}}

    def loss(params, batch, rng):
        # With `poison` 0, the gradient of b is that of a square root at zero.
        value = batch["x"] @ params["a"]["w"] + jnp.sqrt(batch["poison"] * jnp.abs(params["b"]["w"].sum()))
        return jnp.mean(value), {}

    return mw.Job(init=init, rules=[("w", P("fsdp"))], loss=loss)


def batch(poison):
    return {"x": np.ones((8, 8), np.float32), "poison": np.full(8, poison, np.float32)}


@pytest.fixture(scope="module")
def made():
    optimizer = optax.adam(0.1)
    layout = state_layout(job(), optimizer, mw.create_mesh("fsdp:8"))
    return optimizer, layout, make_train_step(job(), optimizer, layout)


def fresh(made):
    return init_state(job(), made[0], made[1], jax.random.key(0))


def test_a_non_finite_step_is_skipped_and_counted(made):
    step, state = made[2], fresh(made)
    state, metrics = step(state, batch(1.0))
    before = jax.device_get((state.params, state.opt_state))
    guard = NonFiniteGuard.for_layout(made[1], limit=3)
    assert guard.check(metrics, step=0) is None
    state, metrics = step(state, batch(0.0))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get((state.params, state.opt_state)), before)
    assert (int(state.step), int(state.skipped), int(state.skipped_in_a_row)) == (2, 1, 1)
    assert (
        guard.check(metrics, step=1, batch_id=17)
        == "step 1 (batch 17) was skipped: the gradient of `b/w` is not finite"
    )
    state, metrics = step(state, batch(1.0))
    assert (int(state.skipped), int(state.skipped_in_a_row), int(metrics["bad_leaf"])) == (1, 0, -1)
    assert not np.array_equal(jax.device_get(state.params["a"]["w"]), before[0]["a"]["w"])


def test_a_run_stops_after_several_skipped_steps_in_a_row(made):
    step, state, guard = made[2], fresh(made), NonFiniteGuard.for_layout(made[1], limit=2)
    state, metrics = step(state, batch(np.nan))
    assert "loss is not finite" in guard.check(metrics | {"bad_leaf": -1}, step=0)
    state, metrics = step(state, batch(np.nan))
    with pytest.raises(mw.TrainingError, match="2 steps in a row were skipped, up to step 1"):
        guard.check(metrics, step=1)


def test_a_donated_state_is_rejected(made):
    step, state = made[2], fresh(made)
    step(state, batch(1.0))
    with pytest.raises(mw.TrainingError, match=r"no longer exists: it was donated.*\nhint: use the state"):
        step(state, batch(1.0))
    keeps = make_train_step(job(), made[0], made[1], donate=False)
    state = fresh(made)
    first, again = keeps(state, batch(1.0))[1], keeps(state, batch(1.0))[1]
    assert float(first["loss"]) == float(again["loss"])


def test_a_state_of_another_dtype_or_optimizer_is_rejected(made):
    step, state = made[2], fresh(made)
    half = dataclasses.replace(state, params=jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), state.params))
    with pytest.raises(mw.TrainingError, match=r"`params/a/w` is bfloat16\[8\], but .* layout has float32\[8\]"):
        step(half, batch(1.0))
    sgd = state_layout(job(), optax.sgd(0.1), made[1].mesh)
    with pytest.raises(mw.TrainingError, match=r"missing \['opt_state/0/count'"):
        step(init_state(job(), optax.sgd(0.1), sgd, jax.random.key(0)), batch(1.0))


def test_processes_that_differ():
    facts = [{"seed": 1, "config": {"lr": 0.1}}, {"seed": 1, "config": {"lr": 0.1}}, {"seed": 2, "config": {"lr": 0.1}}]
    names = ["config", "seed"]
    digests = np.array([
        [np.frombuffer(bytes.fromhex(fingerprint(one[name])), np.uint8) for name in names] for one in facts
    ])  # fmt: skip
    report_disagreement(names, digests[:2], {}, 0)
    with pytest.raises(mw.MeshwrightError, match=r"differ in `seed`: rank 2 of 3 does not .*rank \(0\) it is 1"):
        report_disagreement(names, digests, {"seed": "1"}, 0)


def test_fingerprints_depend_on_shapes_not_values():
    one = {"x": np.zeros((2, 3), np.float32)}
    assert fingerprint(one) == fingerprint({"x": jnp.ones((2, 3))})
    assert fingerprint(one) != fingerprint({"x": np.zeros((3, 2), np.float32)})


def test_two_real_processes_with_different_seeds_both_stop():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    code = textwrap.dedent("""
        import sys
        import jax
        jax.config.update("jax_platforms", "cpu")
        jax.distributed.initialize(f"127.0.0.1:{sys.argv[1]}", 2, int(sys.argv[2]))
        from meshwright.train import require_agreement
        require_agreement({"config": {"lr": 0.1}})
        try:
            require_agreement({"config": {"lr": 0.1}, "seed": int(sys.argv[2])})
        except ValueError as error:
            print(error)
    """)
    processes = [
        subprocess.Popen([sys.executable, "-c", code, str(port), str(rank)], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    for process in processes:
        out, _ = process.communicate(timeout=120)
        assert "differ in `seed`: rank 1 of 2" in out
