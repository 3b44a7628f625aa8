"""The chunked loss and its gradients equal `jax.nn.log_softmax` for every view, option and chunk size."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from meshwright.errors import MeshError, PlacementError
from meshwright.parallel import LossSums, linear_cross_entropy, local_map, varying_axes

from .losses import HEAD, TOKENS, naive, sums_and_grads, values, view_functions
from .one_device import close, mesh_of

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
# For 2 x 16 tokens: one chunk, four chunks, a short last chunk, and less than one row of each sequence.
CHUNKS = {"one": None, "several": 8, "ragged": 7, "flattened": 1}


def arguments(dtype="float32"):
    v = values()
    return v | {"x": v["x"].astype(dtype), "head": v["head"].astype(dtype)}


def with_grads(f, a):
    """The sums and the gradients of three times the total, so that the cotangent is not 1."""

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


def check(f, options, tolerance=2e-6, dtype="float32", grad_tolerance=None):
    sums, grads = jax.jit(lambda a: with_grads(f, a))(arguments(dtype))
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
    """The local view: partial sums over dp, replicated over tp."""

    def f(a):
        sums = ours(a, axis="tp", sequence_parallel=sp, **options)
        assert all(varying_axes(part) <= {"dp"} for part in sums)
        axes = tuple(varying_axes(sums.total))
        return lax.psum(sums, axes) if axes else sums

    specs = {"x": P("dp", "tp" if sp else None), "head": HEAD, "targets": TOKENS, "weights": TOKENS}
    return local_map(f, mesh=mesh_of(ways), in_specs=(specs,), out_specs=P())


table = pytest.mark.parametrize(
    ("ways", "sp", "options", "chunks"),
    [
        *((ways, True, "everything", "several") for ways in (1, 2, 4, 8)),
        (4, False, "everything", "several"),
        (4, True, "plain", "one"),
        (8, True, "padded", "ragged"),
        (4, False, "z-loss", "flattened"),
        *((ways, False, "everything", "several") for ways in (2, 8)),
        *((4, True, options, "one") for options in OPTIONS if options not in ("plain", "everything")),
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
    list(itertools.product(OPTIONS, CHUNKS)),
)
def test_one_device_equals_log_softmax(options, chunks):
    check(lambda a: ours(a, chunk_rows=CHUNKS[chunks], **OPTIONS[options]), options)


@pytest.mark.parametrize("axis", ["tp", None])
@pytest.mark.parametrize("sp", [True, False])
def test_batch_axes_in_a_global_program(axis, sp):
    with jax.set_mesh(mesh_of(4)):
        split = {"axis": axis, "sequence_parallel": sp, "batch_axes": ("dp",), "chunk_rows": 8}
        check(lambda a: ours(a, **split, **EVERYTHING), "everything")


def test_automatic_axis_inside_a_manual_one():
    specs = {"x": TOKENS, "head": P(), "targets": TOKENS, "weights": TOKENS}

    def f(a):
        return lax.psum(ours(a, axis="tp", chunk_rows=8, batch_axes=("dp",), **EVERYTHING), "dp")

    with jax.set_mesh(mesh_of(4)):
        check(local_map(f, mesh=mesh_of(4), axes=("dp",), in_specs=(specs,), out_specs=P()), "everything")


@pytest.mark.parametrize("view", ["plain", "local", "global"])
@pytest.mark.parametrize("sp", [True, False])
def test_bfloat16_is_within_its_precision(view, sp):
    """Compared with float32 on the same rounded values; gradients are rounded once or twice."""
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


def test_logits_have_the_dtype_of_x_by_default():
    v = values()
    x, head = v["x"].astype(jnp.bfloat16), v["head"].astype(jnp.bfloat16)
    exact = linear_cross_entropy(x, head, v["targets"], logits_dtype=jnp.float32).total
    rounded = linear_cross_entropy(x, head, v["targets"]).total
    assert 0 < abs(float(rounded - exact)) < 4e-3 * float(exact)


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


def test_bad_inputs():
    v = values()
    x, head, targets = v["x"], v["head"], v["targets"]
    cases = [
        (lambda: linear_cross_entropy(x, head.T, targets), r"cannot multiply x of shape \(2, 16, 6\) by .*\(40, 6\)"),
        (
            lambda: linear_cross_entropy(x, head, targets[:, :8]),
            r"needs targets of shape \(2, 16\); got \(2, 8\)",
        ),
        (lambda: linear_cross_entropy(x, head, targets, weights=v["weights"][0]), r"needs weights of shape \(2, 16\)"),
        (lambda: linear_cross_entropy(x, head, v["weights"]), r"targets are float32.\nhint: pass integer token ids"),
        (
            lambda: linear_cross_entropy(x, head, targets, vocab_size=41),
            r"vocab_size=41 for 40 columns.\nhint: use 1 to",
        ),
        (
            lambda: linear_cross_entropy(x, head, targets, label_smoothing=1.0),
            r"label_smoothing=1.0 is out of range.\nhint: use 0 or",
        ),
        (
            lambda: linear_cross_entropy(x, head, targets, soft_cap=0.0),
            r"soft_cap=0.0 is out of range.\nhint: use a positive number",
        ),
        (
            lambda: linear_cross_entropy(x, head, targets, chunk_rows=0),
            r"chunk_rows=0 is out of range.\nhint: use a positive number",
        ),
    ]
    for call, text in cases:
        with pytest.raises(PlacementError, match=text):
            call()


def test_bad_inputs_on_a_mesh():
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
