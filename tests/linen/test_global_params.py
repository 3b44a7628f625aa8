"""Bitwise conversion of every kind of layer to the global layout and back, and between axis sizes."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax.core import freeze
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.errors import TreeError
from meshwright.linen import DenseForm, TPAsyncDense, TPDense, from_global, to_global
from meshwright.linen.rings import async_scatter
from meshwright.parallel import local_map

SIZES = (1, 2, 3, 4, 8)
INPUTS, OUTPUTS = 24, 48
RNG = np.random.default_rng(0)
GLOBAL = {
    "kernel": RNG.normal(size=(INPUTS, OUTPUTS)).astype(np.float32),
    "bias": RNG.normal(size=OUTPUTS).astype(np.float32),
}
FORMS = [
    DenseForm(tp_mode=mode, axis_size=size, pieces=pieces, original_split_scatter=split)
    for mode, size, pieces, split in itertools.product(
        ("gather", "scatter", "none"), SIZES, (False, True), (False, True)
    )
    if not split or (mode == "scatter" and pieces)
]


def name_of(form):
    kind = "pieces" if form.pieces else "layer"
    return f"{form.tp_mode}-{form.axis_size}-{kind}{'-original' if form.original_split_scatter else ''}"


def equal(got, expected):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), strict=True)


@pytest.mark.parametrize("form", FORMS, ids=name_of)
@pytest.mark.parametrize("kind", ["numpy", "float64", "bfloat16", "boxed", "no bias", "layers of a scan"])
def test_round_trip_is_bitwise(form, kind):
    whole = dict(GLOBAL)
    if kind == "float64":
        whole = {name: RNG.normal(size=x.shape) for name, x in whole.items()}
    if kind == "bfloat16":
        whole = {name: x.astype(jnp.bfloat16) for name, x in whole.items()}
    if kind == "no bias":
        del whole["bias"]
    if kind == "layers of a scan":
        whole = {name: np.stack([x, 2 * x, 3 * x]) for name, x in whole.items()}
    if kind == "boxed":
        form = DenseForm(**{**form.__dict__, "axis_name": "tp"})
    params = from_global(whole, form)
    if kind == "boxed" and not form.is_plain:
        assert params[form.names[0]]["sharded"]["kernel"].names == ("tp", None, None)
        assert params[form.names[0]]["sharded"]["bias"].names == ("tp", None)
    equal(to_global(freeze(params), form), whole)


@pytest.mark.parametrize("form", [form for form in FORMS if not form.is_plain], ids=name_of)
def test_round_trip_from_a_layer_s_tree(form):
    """The conversion is one to one: no entry of the tree is lost or duplicated."""
    params = from_global(GLOBAL, form)
    numbered = jax.tree.unflatten(
        jax.tree.structure(params),
        [np.arange(x.size, dtype=np.float32).reshape(x.shape) + 1e4 * i for i, x in enumerate(jax.tree.leaves(params))],
    )
    if not form.pieces and form.tp_mode == "scatter":  # only one bias is stored
        numbered["module"]["sharded"]["bias"][1:] = 0
    equal(from_global(to_global(numbered, form), form), numbered)


@pytest.mark.parametrize("pieces", [False, True])
@pytest.mark.parametrize("mode", ["gather", "scatter"])
def test_conversion_between_axis_sizes_and_kinds_of_layer(pieces, mode):
    forms = [DenseForm(tp_mode=mode, axis_size=size, pieces=pieces) for size in SIZES]
    for old, new in itertools.permutations(forms, 2):
        moved = from_global(to_global(from_global(GLOBAL, old), old), new)
        equal(moved, from_global(GLOBAL, new))


def local_outputs(f, size, *args, specs):
    run = local_map(
        f, mesh=mw.create_mesh(f"tp:{size}", devices=size), in_specs=specs, out_specs=P(None, "tp"), check_vma=True
    )
    return jax.jit(run)(*args)


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_parameters_trained_on_one_size_run_on_another(size):
    """A layer on 4 devices equals a layer of the other kind on `size` devices."""
    x = RNG.normal(size=(4, INPUTS)).astype(np.float32)
    old = DenseForm(tp_mode="gather", axis_size=4)
    params = from_global(GLOBAL, old)
    module = TPAsyncDense(functools.partial(nn.Dense, features=OUTPUTS // size), "tp", tp_mode="gather")
    moved = from_global(to_global(params, old), DenseForm.of(module, axis_size=size))
    y = local_outputs(
        lambda params, x: module.apply({"params": params}, x),
        size,
        moved,
        x,
        specs=(nn.get_partition_spec(moved), P(None, "tp")),
    )
    np.testing.assert_allclose(y, x @ GLOBAL["kernel"] + GLOBAL["bias"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_the_originals_split_scatter_converts(size):
    """Compares with the original's ring, in which both halves of entry k leave at hop k, one up and one down."""
    form = DenseForm(tp_mode="scatter", axis_size=size, pieces=True, original_split_scatter=True)
    params = from_global(GLOBAL, form)
    x = RNG.normal(size=(4, INPUTS)).astype(np.float32)

    def original(params, x):
        pieces = [params[name]["sharded"] for name in form.names]
        ys = [x @ piece["kernel"][0] + (piece["bias"][0] if "bias" in piece else 0) for piece in pieces]
        half = ys[0].shape[-1] // 2
        left = async_scatter([y[:, :half] for y in ys], "tp", shift_up=True)
        right = async_scatter([y[:, half:] for y in ys], "tp", shift_up=False)
        return jnp.concatenate([left, right], -1)

    y = local_outputs(original, size, params, x, specs=(P("tp"), P(None, "tp")))
    np.testing.assert_allclose(y, x @ GLOBAL["kernel"] + GLOBAL["bias"], rtol=1e-4, atol=1e-5)


def test_forms_of_layers():
    dense = functools.partial(nn.Dense, features=4)
    assert DenseForm.of(TPDense(dense, "tp", tp_mode="scatter", dense_name="out"), axis_size=4) == DenseForm(
        tp_mode="scatter", axis_size=4, name="out", axis_name="tp"
    )
    assert DenseForm.of(TPAsyncDense(dense, "tp"), axis_size=2, boxed=False) == DenseForm(
        tp_mode="none", axis_size=2, pieces=True
    )
    assert DenseForm(tp_mode="gather", axis_size=1).names == ("Dense_0",)
    assert DenseForm(tp_mode="gather", axis_size=1, name="out").names == ("out",)
    assert DenseForm(tp_mode="gather", axis_size=3, pieces=True).names == ("shard_0", "shard_1", "shard_2")


def test_layers_inside_a_model():
    forms = {
        "block/up": DenseForm(tp_mode="gather", axis_size=4),
        "block/down": DenseForm(tp_mode="scatter", axis_size=4, pieces=True),
        "head": DenseForm(tp_mode="gather", axis_size=1),
    }
    whole = {
        "block": {"up": GLOBAL, "down": GLOBAL, "norm": {"scale": np.ones(3)}},
        "head": GLOBAL,
        "embed": np.ones(2),
    }
    params = from_global(whole, forms)
    assert list(params["block"]["down"]) == ["shard_0", "shard_1", "shard_2", "shard_3"]
    assert list(params["head"]) == ["Dense_0"]
    equal(to_global(params, forms), whole)
    with pytest.raises(TreeError, match=r"no 'blokc' found on the path `blokc/up`.*\nhint: did you mean 'block'"):
        to_global(params, {"blokc/up": forms["head"]})


@pytest.mark.parametrize(
    ("convert", "params", "form", "text"),
    [
        (
            to_global,
            {"other": {}, "module": {}},
            {"tp_mode": "gather", "axis_size": 4},
            r"expected a layer with module; got other",
        ),
        (
            to_global,
            {"module": {"kernel": 1}},
            {"tp_mode": "gather", "axis_size": 4},
            r"expected `sharded` in `module`",
        ),
        (
            to_global,
            from_global(GLOBAL, DenseForm(tp_mode="gather", axis_size=2)),
            {"tp_mode": "gather", "axis_size": 4},
            r"kernel has shape \(2, 24, 24\); on 4 devices, dim -3 must have that size.\nhint: convert outside",
        ),
        (
            to_global,
            from_global(GLOBAL, DenseForm(tp_mode="gather", axis_size=2, pieces=True)),
            {"tp_mode": "gather", "axis_size": 4, "pieces": True},
            r"expected a layer with shard_0, shard_1, shard_2, shard_3; got shard_0, shard_1",
        ),
        (from_global, {"kernel": 1, "scale": 1}, {"tp_mode": "gather", "axis_size": 4}, r"a dense layer has a kernel"),
        (from_global, GLOBAL, {"tp_mode": "gather", "axis_size": 5}, r"48 outputs, which 5 .*48 % 5 = 3"),
        (from_global, GLOBAL, {"tp_mode": "scatter", "axis_size": 5}, r"24 inputs, which 5 .*24 % 5 = 4"),
        (from_global, GLOBAL, {"tp_mode": "gather", "axis_size": 16, "pieces": True}, r"24 inputs, which 16"),
    ],
)
def test_refusals(convert, params, form, text):
    with pytest.raises(TreeError, match=text):
        convert(params, DenseForm(**form))
