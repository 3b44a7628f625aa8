"""Collectives of tensor-parallel layers: kinds, counts and bytes in compiled programs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.parallel import (
    column_dense,
    fused_column_dense,
    local_map,
    row_dense,
    sequence_norm,
    vocab_cross_entropy,
    vocab_embed,
)
from meshwright.plan.compiled.collectives import read_schedule

from .layers import DIM, DOWN, UP, F, R, values


def collectives(f, specs, out, args, ways=8):
    mesh = mw.create_mesh(f"tp:{ways}", devices=ways)
    mapped = local_map(f, mesh=mesh, in_specs=specs, out_specs=out)
    return read_schedule(jax.jit(mapped).lower(*args).compile().as_text()).collectives


def counts(found):
    kinds = {}
    for c in found:
        kinds[c.kind] = kinds.get(c.kind, 0) + c.trips
    return kinds


@pytest.mark.parametrize("ways", [2, 8])
def test_ring_has_one_hop_fewer_than_devices(ways):
    v = values()
    run = functools.partial(collectives, ways=ways)
    column = run(
        lambda x, w, b: column_dense(x, w, b, axis="tp", form="ring"),
        (R, UP, DOWN),
        F,
        (v["x"], v["gate"], v["b_gate"]),
    )
    fused = run(
        lambda x, *ws: fused_column_dense(x, ws, axis="tp", form="ring"), (R, UP, UP, UP), F, (v["x"], *3 * [v["gate"]])
    )
    row = run(
        lambda x, w, b: row_dense(x, w, b, axis="tp", form="ring"),
        (F, DOWN, P()),
        R,
        (v["hidden"], v["down"], v["b_down"]),
    )
    for found in (column, fused, row):
        assert counts(found) == {"collective-permute": ways - 1}
        assert sum(c.bytes_moved for c in found) == v["x"].nbytes * (ways - 1) / ways


def test_without_sequence_parallelism_there_is_one_all_reduce_per_pass():
    v = values()

    def mlp(x, up, down):
        h = column_dense(x, up, axis="tp", sequence_parallel=False)
        return row_dense(jnp.tanh(h), down, axis="tp", sequence_parallel=False)

    args, specs = (v["x"], v["gate"], v["down"]), (P(), UP, DOWN)
    forward = collectives(mlp, specs, P(), args)
    assert counts(forward) == {"all-reduce": 1}
    assert forward[0].bytes_moved == v["x"].nbytes

    def grads(*args):
        return jax.grad(lambda *args: jnp.sum(jnp.sin(mlp(*args))), argnums=(0, 1, 2))(*args)

    assert counts(collectives(grads, specs, specs, args)) == {"all-reduce": 2}


def test_norm_only_sums_its_scale_gradient():
    v = values()
    norm = functools.partial(sequence_norm, axis="tp")
    assert not collectives(norm, (R, P()), R, (v["x"], v["scale"]))

    def grads(x, scale):
        return jax.grad(lambda x, s: jnp.sum(jnp.sin(norm(x, s))), argnums=(0, 1))(x, scale)

    found = collectives(grads, (R, P()), (R, P()), (v["x"], v["scale"]))
    assert counts(found) == {"all-reduce": 1}
    assert found[0].bytes_moved == v["scale"].nbytes
    # With bfloat16 the sum is still in float32.
    low = [value.astype(jnp.bfloat16) for value in (v["x"], v["scale"])]
    assert collectives(grads, (R, P()), (R, P()), low)[0].bytes_moved == 4 * DIM


@pytest.mark.parametrize("sp", [True, False])
def test_embedding_sends_rows_and_never_the_table(sp):
    v = values()
    embed = functools.partial(vocab_embed, axis="tp", sequence_parallel=sp)
    found = collectives(embed, (P(), DOWN), R if sp else P(), (v["ids"], v["table"]))
    assert counts(found) == {"reduce-scatter" if sp else "all-reduce": 1}
    assert found[0].bytes_moved == v["x"].nbytes

    def grad(ids, table):
        return jax.grad(lambda t: jnp.sum(jnp.sin(embed(ids, t))))(table)

    for c in collectives(grad, (P(), DOWN), DOWN, (v["ids"], v["table"])):
        assert c.bytes_moved <= v["x"].nbytes


@pytest.mark.parametrize("view", ["local", "global"])
@pytest.mark.parametrize("sp", [True, False])
def test_loss_sends_its_rows_and_three_numbers_per_token(sp, view):
    """Neither pass sends logits or the head, which is ten times as large as the rows."""
    rng = np.random.default_rng(0)
    x, head = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((1, 8, 4), (4, 1024)))
    targets = jnp.asarray(rng.integers(0, 1024, (1, 8)))
    mesh = mw.create_mesh("tp:8")

    def loss(x, head, targets):
        return vocab_cross_entropy(x, head, targets, axis="tp", sequence_parallel=sp).sum()

    specs = (R if sp else P(), UP, P())
    placed = [jax.device_put(a, jax.NamedSharding(mesh, s)) for a, s in zip((x, head, targets), specs, strict=True)]

    def schedule(f, out):
        f = local_map(f, mesh=mesh, in_specs=specs, out_specs=out) if view == "local" else f
        out_shardings = jax.tree.map(lambda s: jax.NamedSharding(mesh, s), out, is_leaf=lambda s: isinstance(s, P))
        with jax.set_mesh(mesh):
            text = jax.jit(f, out_shardings=out_shardings).lower(*placed).compile().as_text()
        return read_schedule(text).collectives

    forward = schedule(loss, P())
    beside = [c for c in forward if c.kind == "all-reduce"]
    assert sum(c.bytes_moved for c in beside) == 3 * targets.size * 4
    assert counts(forward).get("collective-permute", 0) == (7 if sp else 0)
    assert set(counts(forward)) <= {"all-reduce", "collective-permute"}
    for c in schedule(jax.grad(loss, argnums=(0, 1)), specs[:2]):
        assert c.bytes_moved <= x.nbytes, c
