"""Cost of the chunked loss in compiled programs: largest array, memory, matmuls and collectives."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from meshwright.parallel import linear_cross_entropy, local_map, pcast_varying
from meshwright.plan.compiled.collectives import read_schedule

from .losses import HEAD, TOKENS, naive
from .one_device import mesh_of

MANY, WIDE = 256, 4096


def big():
    """Arguments whose logits are by far the largest array."""
    return (
        jax.ShapeDtypeStruct((2, MANY // 2, 8), jnp.float32),
        jax.ShapeDtypeStruct((8, WIDE), jnp.float32),
        jax.ShapeDtypeStruct((2, MANY // 2), jnp.int32),
        jax.ShapeDtypeStruct((2, MANY // 2), jnp.float32),
    )


def largest_array(text):
    return max(math.prod(map(int, dims.split(","))) for dims in re.findall(r"\b[a-z]+\d+\[([\d,]+)\]", text))


def loss(x, head, targets, weights, **options):
    return linear_cross_entropy(x, head, targets, weights=weights, chunk_rows=32, **options).total


def kept_loss(x, head, targets, weights):
    return naive({"x": x, "head": head, "targets": targets, "weights": weights}).total


def test_no_array_is_as_large_as_all_logits():
    """The reference loss shows that the checks would fail."""
    for f, least in ((loss, 1 / 8), (kept_loss, 1)):
        compiled = jax.jit(jax.value_and_grad(f, argnums=(0, 1))).lower(*big()).compile()
        assert largest_array(compiled.as_text()) == MANY * WIDE * least
        temporary = compiled.memory_analysis().temp_size_in_bytes
        # One chunk's logits and their gradient, and the float32 gradient of the head.
        assert (temporary < 4 * MANY * WIDE * 0.4) == (f is loss)


@pytest.mark.parametrize("view", ["local", "global"])
def test_no_device_holds_all_of_its_logits(view):
    mesh = mesh_of(4)
    specs = (P("dp", "tp"), HEAD, TOKENS, TOKENS)
    split = functools.partial(loss, axis="tp")
    if view == "local":
        split = local_map(lambda *a: lax.psum(loss(*a, axis="tp"), "dp"), mesh=mesh, in_specs=specs, out_specs=P())
    placed = [
        jax.ShapeDtypeStruct(struct.shape, struct.dtype, sharding=jax.NamedSharding(mesh, spec))
        for struct, spec in zip(big(), specs, strict=True)
    ]
    with jax.set_mesh(mesh):
        text = jax.jit(jax.value_and_grad(split, argnums=(0, 1))).lower(*placed).compile().as_text()
    # In the local view a chunk has one device's rows; in the global view, rows of all devices.
    assert largest_array(text) == (32 if view == "local" else 16) * WIDE // 4


def test_three_matmuls_with_gradients_and_one_without():
    def matmuls(f):
        return str(jax.make_jaxpr(f)(*big())).count("dot_general[")

    assert matmuls(loss) == 1
    assert matmuls(jax.value_and_grad(loss, argnums=(0, 1))) == 3


def collectives(f, specs, out):
    """Kinds and bytes of all collectives, counting loop iterations."""
    mesh = mesh_of(4)
    placed = [
        jax.ShapeDtypeStruct(struct.shape, struct.dtype, sharding=jax.NamedSharding(mesh, spec))
        for struct, spec in zip(big(), specs, strict=True)
    ]
    out_shardings = tuple(jax.NamedSharding(mesh, spec) for spec in out)
    with jax.set_mesh(mesh):
        text = jax.jit(f, out_shardings=out_shardings).lower(*placed).compile().as_text()
    return sorted((c.kind, c.trips, c.trips * c.bytes_moved) for c in read_schedule(text).collectives)


def test_sends_rows_once_and_five_numbers_per_token_but_never_the_head():
    specs = (P("dp", "tp"), HEAD, TOKENS, TOKENS)

    def grads(x, head, targets, weights):
        # Keep each device's gradient of the head, without the sum over dp.
        return jax.grad(functools.partial(loss, axis="tp"), argnums=(0, 1))(
            x, pcast_varying(head, "dp"), targets, weights
        )

    out = specs[0], P("dp", "tp")
    found = collectives(local_map(grads, mesh=mesh_of(4), in_specs=specs, out_specs=out), specs, out)
    rows, num_chunks = MANY // 2 * 8 * 4, MANY // 2 // 32
    assert [(kind, trips) for kind, trips, _ in found] == [
        ("all-gather", 1), ("all-gather", num_chunks), ("reduce-scatter", 1)
    ]  # fmt: skip
    assert [moved for _, _, moved in found] == [rows, num_chunks * 5 * 4 * 4 * 32, rows]


def test_batch_axes_sum_the_head_gradient_once_in_a_global_program():
    specs, slice_bytes = (P("dp", "tp"), HEAD, TOKENS, TOKENS), 8 * WIDE * 4 // 4

    def reduced(**options):
        f = jax.grad(functools.partial(loss, axis="tp", **options), argnums=(0, 1))
        return sum(moved for kind, _, moved in collectives(f, specs, specs[:2]) if kind == "all-reduce")

    assert slice_bytes <= reduced(batch_axes=("dp",)) < 1.1 * slice_bytes
    assert reduced() >= MANY // 32 * slice_bytes
