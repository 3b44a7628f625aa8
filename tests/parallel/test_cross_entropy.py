"""The chunked loss against `jax.nn.log_softmax` on one device: every view, option and chunk size, with gradients."""

import contextlib
import functools
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.errors import MeshError, PlacementError
from meshwright.parallel import LossSums, linear_cross_entropy, local_map, vary, varying_axes, vocab_cross_entropy
from meshwright.parallel.cross_entropy import _Rows
from meshwright.plan.schedule import read_schedule

QUICKLY = {"xla_backend_optimization_level": 0}  # a third of the time to compile, and the same function
# Sizes that every axis size divides, all different, so that no two dims can be mistaken for each other.
BATCH, ROWS, DIM, VOCAB = 2, 16, 6, 40
TOKENS, HEAD = P("dp"), P(None, "tp")

PLAIN: dict = {}
EVERYTHING = {"z_loss": 0.1, "label_smoothing": 0.2, "soft_cap": 3.0, "vocab_size": 33}
OPTIONS = {
    "plain": PLAIN,
    "z-loss": {"z_loss": 0.1},
    "smoothing": {"label_smoothing": 0.2},
    "soft cap": {"soft_cap": 3.0},
    "padded": {"vocab_size": 33},
    "everything": EVERYTHING,
}
# Of 2 x 16 tokens: all at once; four chunks; six of which the last is short; less than one row of each sequence.
CHUNKS = {"one": None, "several": 8, "ragged": 7, "flattened": 1}


@functools.cache
def mesh_of(ways):
    """Data parallelism beside the tensor axis wherever devices are left for it."""
    data = 2 if ways <= 4 else 1
    return mw.create_mesh(f"dp:{data},tp:{ways}", devices=data * ways)


@functools.cache
def values():
    """Weights between 0 and 1 of which a fifth are zero; logits that are far enough apart to be capped."""
    rng = np.random.default_rng(0)
    return {
        "x": rng.standard_normal((BATCH, ROWS, DIM), np.float32),
        "head": rng.standard_normal((DIM, VOCAB), np.float32),
        "targets": rng.integers(0, 33, (BATCH, ROWS), np.int32),
        "weights": rng.random((BATCH, ROWS), np.float32) * (rng.random((BATCH, ROWS)) < 0.8),
    }


def arguments(dtype="float32"):
    v = values()
    return v | {"x": v["x"].astype(dtype), "head": v["head"].astype(dtype)}


def naive(a, *, vocab_size=None, z_loss=0.0, label_smoothing=0.0, soft_cap=None):
    """The same sums as one would write them down."""
    logits = a["x"].astype(jnp.float32) @ a["head"].astype(jnp.float32)[:, :vocab_size]
    logits = logits if soft_cap is None else soft_cap * jnp.tanh(logits / soft_cap)
    log_p, weights = jax.nn.log_softmax(logits), a["weights"]
    loss = -jnp.take_along_axis(log_p, a["targets"][..., None], -1)[..., 0]
    z = z_loss * jax.nn.logsumexp(logits, axis=-1) ** 2
    total = (1 - label_smoothing) * loss - label_smoothing * log_p.mean(-1) + z
    terms = total, loss, z, jnp.ones_like(z), logits.argmax(-1) == a["targets"]
    return LossSums(*((term * weights).sum() for term in terms))


def with_grads(f, a):
    """The sums, and the gradients of three times the total: a cotangent that is not one."""

    def total(moving):
        sums = f(a | moving)
        return 3 * sums.total, sums

    grads, sums = jax.grad(total, has_aux=True)({"x": a["x"], "head": a["head"]})
    return sums, grads


@functools.cache
def expected(options, dtype="float32"):
    args = arguments(dtype)
    wide = args | {name: args[name].astype(np.float32) for name in ("x", "head")}
    return jax.device_get(jax.jit(lambda a: with_grads(lambda a: naive(a, **OPTIONS[options]), a))(wide))


def close(got, true, tolerance, what):
    error = np.abs(np.asarray(got, np.float32) - true).max()
    assert error <= tolerance * max(np.abs(true).max(), 1e-30), (what, error)


def check(f, options, tolerance=2e-6, dtype="float32", grad_tolerance=None):
    sums, grads = jax.jit(lambda a: with_grads(f, a), compiler_options=QUICKLY)(arguments(dtype))
    true_sums, true_grads = expected(options, dtype)
    for name, got, true in zip(LossSums._fields, sums, true_sums, strict=True):
        assert got.dtype == jnp.float32
        close(got, true, tolerance, name)
    for name, true in true_grads.items():
        assert grads[name].dtype == dtype
        close(grads[name], true, grad_tolerance or tolerance, name)


def ours(a, **options):
    return linear_cross_entropy(a["x"], a["head"], a["targets"], weights=a["weights"], **options)


def local(ways, sp, **options):
    """In the local view: partial sums over dp, the same on every device of tp."""

    def f(a):
        sums = ours(a, axis="tp", sequence_parallel=sp, **options)
        assert all(varying_axes(part) <= {"dp"} for part in sums)
        axes = tuple(varying_axes(sums.total))
        return lax.psum(sums, axes) if axes else sums

    specs = {"x": P("dp", "tp" if sp else None), "head": HEAD, "targets": TOKENS, "weights": TOKENS}
    return local_map(f, mesh=mesh_of(ways), in_specs=(specs,), out_specs=P())


def slow(*row):
    return pytest.param(*row, marks=pytest.mark.slow)


table = pytest.mark.parametrize(
    ("ways", "sp", "options", "chunks"),
    [
        *((ways, True, "everything", "several") for ways in (1, 2, 4, 8)),
        (4, False, "everything", "several"),
        (4, True, "plain", "one"),
        (8, True, "padded", "ragged"),
        (4, False, "z-loss", "flattened"),
        *(slow(ways, False, "everything", "several") for ways in (2, 8)),
        *(slow(4, True, options, "one") for options in OPTIONS if options not in ("plain", "everything")),
    ],
    ids=str,
)


@table
def test_local_view_equals_one_device(ways, sp, options, chunks):
    check(local(ways, sp, chunk_rows=CHUNKS[chunks], **OPTIONS[options]), options)


@table
def test_global_view_equals_one_device(ways, sp, options, chunks):
    with jax.set_mesh(mesh_of(ways)):
        split = {"axis": "tp", "sequence_parallel": sp, "chunk_rows": CHUNKS[chunks]}
        check(lambda a: ours(a, **split, **OPTIONS[options]), options)


@pytest.mark.parametrize(
    ("options", "chunks"),
    [(row if "everything" in row or "ragged" in row else slow(*row)) for row in itertools.product(OPTIONS, CHUNKS)],
)
def test_one_device_equals_log_softmax(options, chunks):
    check(lambda a: ours(a, chunk_rows=CHUNKS[chunks], **OPTIONS[options]), options)


@pytest.mark.parametrize("axis", ["tp", None])
@pytest.mark.parametrize("sp", [True, False])
def test_axes_that_split_the_batch_of_a_global_program(axis, sp):
    with jax.set_mesh(mesh_of(4)):
        split = {"axis": axis, "sequence_parallel": sp, "batch_axes": ("dp",), "chunk_rows": 8}
        check(lambda a: ours(a, **split, **EVERYTHING), "everything")


def test_the_axis_may_be_automatic_inside_another_one_that_is_manual():
    specs = {"x": TOKENS, "head": P(), "targets": TOKENS, "weights": TOKENS}

    def f(a):
        return lax.psum(ours(a, axis="tp", chunk_rows=8, batch_axes=("dp",), **EVERYTHING), "dp")

    with jax.set_mesh(mesh_of(4)):
        check(local_map(f, mesh=mesh_of(4), axes=("dp",), in_specs=(specs,), out_specs=P()), "everything")


@pytest.mark.parametrize("view", ["plain", "local", "global"])
@pytest.mark.parametrize("sp", [True, False])
def test_bfloat16_is_as_close_as_its_digits(view, sp):
    """Against float32 on the same rounded numbers: sums are as good, gradients are rounded once or twice."""
    options = {"chunk_rows": 8, "logits_dtype": jnp.float32, **EVERYTHING}
    f = {
        "plain": lambda a: ours(a, **options),
        "local": local(4, sp, **options),
        "global": lambda a: ours(a, axis="tp", sequence_parallel=sp, **options),
    }[view]
    with jax.set_mesh(mesh_of(4)):
        check(f, "everything", dtype="bfloat16", grad_tolerance=1e-2)


@pytest.mark.parametrize("dtypes", [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_gradients_have_the_dtypes_of_their_arguments(dtypes):
    v = values()
    x, head = v["x"].astype(dtypes[0]), v["head"].astype(dtypes[1])
    sums, grads = sums_and_grads(view_functions()["plain"], x, head, v["targets"], v["weights"])
    assert tuple(grad.dtype for grad in grads) == dtypes
    close(sums.total, naive(v | {"x": x, "head": head}).total, 2e-6, "total")


def test_the_gradient_of_the_head_counts_exactly_over_many_chunks():
    """1024 halves: in bfloat16, adding them one by one ends at 128."""
    x, head, targets = jnp.ones((1024, 1), jnp.bfloat16), jnp.zeros((1, 2), jnp.bfloat16), jnp.zeros(1024, int)
    grad = jax.jit(jax.grad(lambda head: linear_cross_entropy(x, head, targets, chunk_rows=1).total))(head)
    np.testing.assert_array_equal(np.asarray(grad, np.float32), [[-512, 512]])


@pytest.mark.parametrize(("shape", "chunk_rows"), [((7,), 2), ((3, 1, 5), 6), ((11, 3), 4), ((2, 0), None)])
def test_any_number_of_leading_dims(shape, chunk_rows):
    rng = np.random.default_rng(1)
    x, head = rng.standard_normal((*shape, DIM), np.float32), values()["head"]
    targets = rng.integers(0, VOCAB, shape)
    sums, grads = sums_and_grads(
        lambda x, head, t, w: linear_cross_entropy(x, head, t, weights=w, chunk_rows=chunk_rows),
        x, head, targets, np.ones(shape, np.float32),
    )  # fmt: skip
    log_p, one_hot = jax.nn.log_softmax(x @ head), np.eye(VOCAB, dtype=np.float32)[targets]
    np.testing.assert_allclose(sums.count, targets.size)
    np.testing.assert_allclose(sums.total, -(log_p * one_hot).sum(), rtol=1e-6)
    np.testing.assert_allclose(grads[0], (np.exp(log_p) - one_hot) @ head.T, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "chunk_rows"), [((5,), 9), ((5,), 2), ((3, 4), 6), ((3, 4), 7), ((3, 4), 2), ((2, 3, 5), 12)]
)
def test_chunks_hold_every_row_once_and_no_more_than_asked(shape, chunk_rows):
    rows = _Rows.of(shape, 100, chunk_rows)
    array = np.arange(1.0, math.prod(shape) * 2 + 1, dtype=np.float32).reshape(*shape, 2)
    chunks = np.asarray(rows.cut(jnp.asarray(array), features=True))
    assert math.prod(chunks.shape[1:-1]) <= chunk_rows
    assert sorted(chunks[chunks > 0]) == sorted(array.flatten())
    np.testing.assert_array_equal(rows.join(jnp.asarray(chunks)), array)


def test_the_default_chunk_is_half_a_gibibyte_or_2048_rows():
    for num_columns, rows in ((131072, 2048), (32768, 4096), (1024, 131072)):
        found = _Rows.of((16, 65536), 4 * num_columns, None)
        assert found.num_chunks == 16 * 65536 // rows
    assert _Rows.of((2, 16), 4 * 131072, None).num_chunks == 1


def test_logits_are_rounded_to_the_dtype_of_x_unless_asked_otherwise():
    v = values()
    x, head = v["x"].astype(jnp.bfloat16), v["head"].astype(jnp.bfloat16)
    exact = linear_cross_entropy(x, head, v["targets"], logits_dtype=jnp.float32).total
    rounded = linear_cross_entropy(x, head, v["targets"]).total
    assert 0 < abs(float(rounded - exact)) < 4e-3 * float(exact)


# --- What counts and what does not ---


@functools.cache
def view_functions():
    def f(x, head, targets, weights):
        return linear_cross_entropy(x, head, targets, weights=weights, axis="tp", chunk_rows=8)

    mapped = local_map(f, mesh=mesh_of(8), in_specs=(P(None, "tp"), HEAD, P(), P()), out_specs=P())
    return {"plain": f, "local": mapped, "global": functools.partial(f)}


@functools.cache
def differentiated(f):
    def total(x, head, targets, weights):
        sums = f(x, head, targets, weights)
        return sums.total, sums

    return jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True), compiler_options=QUICKLY)


def sums_and_grads(f, *args):
    (_, sums), grads = differentiated(f)(*args)
    return sums, grads


@pytest.mark.parametrize(
    ("view", "kind"),
    [("plain", bool), ("plain", np.float32), ("plain", np.int32), ("local", bool), ("global", np.float32)],
)
def test_what_has_no_weight_may_be_anything(view, kind):
    v = values()
    weights = np.asarray(v["weights"] > 0, kind)
    x = np.where(weights[..., None] != 0, v["x"], np.nan)
    targets = np.where(weights, v["targets"], [-1, 10**6][kind is bool])
    true, (dx, dhead) = sums_and_grads(
        lambda x, head, t, w: naive({"x": x, "head": head, "targets": t, "weights": w}),
        v["x"], v["head"], v["targets"], np.asarray(weights, np.float32),
    )  # fmt: skip
    with mesh_in_force(view):
        sums, grads = sums_and_grads(view_functions()[view], x, v["head"], targets, weights)
    np.testing.assert_allclose(sums, true, rtol=1e-5)
    close(grads[0], dx, 2e-6, "x")
    close(grads[1], dhead, 2e-6, "head")
    assert not np.asarray(grads[0])[weights == 0].any()


def mesh_in_force(view):
    return jax.set_mesh(mesh_of(8)) if view == "global" else contextlib.nullcontext()


@pytest.mark.parametrize("view", ["plain", "local", "global"])
def test_a_target_outside_of_the_vocabulary_is_nan_where_it_counts(view):
    v = values()
    f, weights = view_functions()[view], np.ones_like(v["weights"])
    for bad in (-1, VOCAB, 10**6):
        targets = v["targets"].copy()
        targets[1, 3] = bad
        with mesh_in_force(view):
            sums, (dx, dhead) = sums_and_grads(f, v["x"], v["head"], targets, weights)
        assert np.isnan(sums.total)
        assert np.isnan(sums.cross_entropy)
        assert sums.count == BATCH * ROWS
        assert np.isnan(dhead).all()
        assert np.argwhere(np.isnan(dx).any(-1)).tolist() == [[1, 3]]


def test_nothing_counts():
    v = values()
    for x in (v["x"], np.full_like(v["x"], np.nan)):
        sums, grads = sums_and_grads(
            view_functions()["plain"], x, v["head"], v["targets"] - 100, np.zeros_like(v["weights"])
        )
        assert all(part == 0 for part in sums)
        assert not any(np.asarray(grad).any() for grad in grads)


def test_only_the_total_has_a_gradient():
    v = values()

    def grads(field, x, head, weights):
        def f(x, head, weights):
            sums = linear_cross_entropy(x, head, v["targets"], weights=weights, z_loss=0.1)
            return sums.total + (5 * getattr(sums, field) if field else 0)

        return jax.grad(f, argnums=(0, 1, 2))(x, head, weights)

    fields = (None, *LossSums._fields[1:])
    true, *found = jax.jit(lambda *args: [grads(field, *args) for field in fields])(v["x"], v["head"], v["weights"])
    assert all(np.asarray(grad).any() for grad in true[:2])
    assert not np.asarray(true[2]).any()  # weights are constants
    for got in found:
        jax.tree.map(np.testing.assert_array_equal, got, true)


@pytest.mark.parametrize("view", ["plain", "local", "global"])
def test_of_equal_logits_the_first_is_the_prediction(view):
    v = values()
    targets = np.arange(BATCH * ROWS).reshape(BATCH, ROWS) % 8
    with mesh_in_force(view):
        f = jax.jit(view_functions()[view], compiler_options=QUICKLY)
        for first in (0, 5, 7):
            head = np.where(np.arange(VOCAB) >= first, 1.0, -1.0) * np.ones((DIM, 1), np.float32)
            sums = f(np.ones_like(v["x"]), head.astype(np.float32), targets, np.ones_like(v["weights"]))
            assert sums.correct == (targets == first).sum()


@pytest.mark.parametrize("view", ["plain", "local", "global"])
def test_huge_logits_stay_finite(view):
    x, head = np.full((1, 8, 1), 1e4, np.float32), np.linspace(-1, 1, 8, dtype=np.float32)[None]
    with mesh_in_force(view):
        sums, grads = sums_and_grads(view_functions()[view], x, head, np.full((1, 8), 6), np.ones((1, 8), np.float32))
    np.testing.assert_allclose(sums.total, 8e4 * (head[0, 7] - head[0, 6]), rtol=1e-5)
    assert all(np.isfinite(grad).all() for grad in grads)


@pytest.mark.parametrize("view", ["plain", "local", "global"])
def test_columns_added_to_a_vocabulary_count_for_nothing_however_large(view):
    """33 tokens on 8 devices: padded to 40, the last device has nothing but padding."""
    v = values()
    # Along each row of x, the padding has by far the largest logit, and a target the largest but for it.
    head = np.concatenate([v["head"][:, :33], 1e3 * np.ones((DIM, 7), np.float32)], axis=1)
    x, weights = np.abs(v["x"]), np.ones_like(v["weights"])
    targets = (x @ head[:, :33]).argmax(-1)

    def f(x, head, targets, weights):
        return linear_cross_entropy(x, head, targets, weights=weights, axis="tp", vocab_size=33, label_smoothing=0.1)

    g = f
    if view == "local":
        g = local_map(f, mesh=mesh_of(8), in_specs=(P(None, "tp"), HEAD, P(), P()), out_specs=P())
    with mesh_in_force(view):
        sums, grads = sums_and_grads(g, x, head, targets, weights)
    true, true_grads = sums_and_grads(
        lambda x, head, t, w: naive({"x": x, "head": head, "targets": t, "weights": w}, label_smoothing=0.1),
        x, head[:, :33], targets, weights,
    )  # fmt: skip
    np.testing.assert_allclose(sums, true, rtol=1e-5)
    assert sums.correct == targets.size
    close(grads[0], true_grads[0], 2e-6, "x")
    close(grads[1][:, :33], true_grads[1], 2e-6, "head")
    assert not grads[1][:, 33:].any()


def test_it_is_the_sum_of_the_losses_of_each_token():
    v = values()
    each, sums = jax.jit(lambda *a: (vocab_cross_entropy(*a, axis=None), linear_cross_entropy(*a)))(
        v["x"], v["head"], v["targets"]
    )
    np.testing.assert_allclose(sums.total, each.sum(), rtol=1e-6)


def test_under_remat_and_vmap():
    v = values()
    true = expected("plain")[1]

    def each(x, head, targets, weights):
        return linear_cross_entropy(x, head, targets, weights=weights, chunk_rows=4)

    @functools.partial(jax.vmap, in_axes=(0, None, 0, 0))
    @jax.checkpoint
    def tripled(*args):
        return jax.tree.map(lambda part: 3 * part, each(*args))

    _, grads = sums_and_grads(lambda *args: LossSums(*(part.sum() for part in tripled(*args))), *v.values())
    close(grads[0], true["x"], 2e-6, "x")
    close(grads[1], true["head"], 2e-6, "head")


# --- What it costs ---

MANY, WIDE = 256, 4096


def big():
    """Enough rows and columns for logits to be by far the largest array."""
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
    """The reference shows that the text and the memory would tell."""
    for f, least in ((loss, 1 / 8), (kept_loss, 1)):
        compiled = jax.jit(jax.value_and_grad(f, argnums=(0, 1))).lower(*big()).compile()
        assert largest_array(compiled.as_text()) == MANY * WIDE * least
        temporary = compiled.memory_analysis().temp_size_in_bytes
        # One chunk's logits, their gradient, and the float32 gradient of the head beside it.
        assert (temporary < 4 * MANY * WIDE * 0.4) == (f is loss)


@pytest.mark.parametrize("view", ["local", "global"])
def test_no_device_of_a_mesh_has_all_of_its_logits(view):
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
    # In the local view a chunk is of one device's rows; in the global one, of all devices' rows.
    assert largest_array(text) == (32 if view == "local" else 16) * WIDE // 4


def test_three_matmuls_with_gradients_and_one_without():
    def matmuls(f):
        return str(jax.make_jaxpr(f)(*big())).count("dot_general[")

    assert matmuls(loss) == 1
    assert matmuls(jax.value_and_grad(loss, argnums=(0, 1))) == 3


def collectives(f, specs, out):
    """Kinds and bytes of all collectives, those of a loop as often as it runs."""
    mesh = mesh_of(4)
    placed = [
        jax.ShapeDtypeStruct(struct.shape, struct.dtype, sharding=jax.NamedSharding(mesh, spec))
        for struct, spec in zip(big(), specs, strict=True)
    ]
    out_shardings = tuple(jax.NamedSharding(mesh, spec) for spec in out)
    with jax.set_mesh(mesh):
        text = jax.jit(f, out_shardings=out_shardings).lower(*placed).compile().as_text()
    return sorted((c.kind, c.trips, c.trips * c.bytes_moved) for c in read_schedule(text).collectives)


def test_rows_travel_once_the_head_never_and_five_numbers_per_token():
    specs = (P("dp", "tp"), HEAD, TOKENS, TOKENS)

    def grads(x, head, targets, weights):
        # Each device's own gradient of the head: the sum over dp is the caller's.
        return jax.grad(functools.partial(loss, axis="tp"), argnums=(0, 1))(x, vary(head, "dp"), targets, weights)

    out = specs[0], P("dp", "tp")
    found = collectives(local_map(grads, mesh=mesh_of(4), in_specs=specs, out_specs=out), specs, out)
    rows, num_chunks = MANY // 2 * 8 * 4, MANY // 2 // 32
    assert [(kind, trips) for kind, trips, _ in found] == [
        ("all-gather", 1), ("all-gather", num_chunks), ("reduce-scatter", 1)
    ]  # fmt: skip
    assert [moved for _, _, moved in found] == [rows, num_chunks * 5 * 4 * 4 * 32, rows]


def test_a_global_program_sums_the_gradient_of_the_head_once_if_told_how_the_batch_is_split():
    specs, slice_bytes = (P("dp", "tp"), HEAD, TOKENS, TOKENS), 8 * WIDE * 4 // 4

    def reduced(**options):
        f = jax.grad(functools.partial(loss, axis="tp", **options), argnums=(0, 1))
        return sum(moved for kind, _, moved in collectives(f, specs, specs[:2]) if kind == "all-reduce")

    assert slice_bytes <= reduced(batch_axes=("dp",)) < 1.1 * slice_bytes
    assert reduced() >= MANY // 32 * slice_bytes


# --- Bad inputs ---


def test_what_does_not_fit():
    v = values()
    x, head, targets = v["x"], v["head"], v["targets"]
    cases = [
        (lambda: linear_cross_entropy(x, head.T, targets), r"cannot multiply x of shape \(2, 16, 6\) by .*\(40, 6\)"),
        (
            lambda: linear_cross_entropy(x, head, targets[:, :8]),
            r"needs targets of shape \(2, 16\); they have \(2, 8\)",
        ),
        (lambda: linear_cross_entropy(x, head, targets, weights=v["weights"][0]), r"needs weights of shape \(2, 16\)"),
        (lambda: linear_cross_entropy(x, head, v["weights"]), r"targets are float32.\nhint: give the integers"),
        (
            lambda: linear_cross_entropy(x, head, targets, vocab_size=41),
            r"vocab_size=41 of 40 columns.\nhint: use 1 to",
        ),
        (lambda: linear_cross_entropy(x, head, targets, label_smoothing=1.0), r"label_smoothing=1.0.\nhint: use 0 to"),
        (lambda: linear_cross_entropy(x, head, targets, soft_cap=0.0), r"soft_cap=0.0.\nhint: use a positive number"),
        (lambda: linear_cross_entropy(x, head, targets, chunk_rows=0), r"chunk_rows=0.\nhint: use a positive number"),
    ]
    for call, text in cases:
        with pytest.raises(PlacementError, match=text):
            call()


def test_what_does_not_fit_a_mesh():
    v = values()
    x, head, targets = v["x"], v["head"], v["targets"]
    with jax.set_mesh(mesh_of(4)):
        with pytest.raises(PlacementError, match=r"38 tokens of vocabulary cannot be split over 4 .*\nhint: pad to 40"):
            linear_cross_entropy(x, head[:, :38], targets, axis="tp")
        with pytest.raises(PlacementError, match=r"14 rows cannot be split over 4 .*\nhint: pad to 16"):
            linear_cross_entropy(x[:, :14], head, targets[:, :14], axis="tp")
        with pytest.raises(PlacementError, match=r"first dim of x, .* cannot be split over the 2 devices of \('dp',\)"):
            linear_cross_entropy(x[:1], head, targets[:1], batch_axes=("dp",))
        with pytest.raises(MeshError, match=r"linear_cross_entropy: batch_axes names axis 'pd'; .*\nhint: did you"):
            linear_cross_entropy(x, head, targets, batch_axes=("pd",))
        with pytest.raises(MeshError, match=r"linear_cross_entropy names axis 'pt'; .*\nhint: did you"):
            linear_cross_entropy(x, head, targets, axis="pt")
    whole = local_map(
        lambda *a: linear_cross_entropy(*a, axis="tp").total, mesh=mesh_of(4), in_specs=(P(), P(), P()), out_specs=P()
    )
    with pytest.raises(PlacementError, match=r"head of shape \(6, 40\) is the same on every device of axis 'tp'"):
        whole(x, head, targets)
