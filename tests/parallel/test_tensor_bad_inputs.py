"""Errors of tensor-parallel layers: heads, slices, sizes, shapes, options and axes."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from meshwright.errors import MeshError, PlacementError
from meshwright.parallel import (
    column_dense,
    fused_column_dense,
    local_heads,
    local_map,
    row_dense,
    sequence_norm,
    vocab_cross_entropy,
    vocab_embed,
)

from .layers import DIM, SPLIT, UP, WHOLE, values
from .one_device import mesh_of


def test_heads_not_divisible_by_the_tensor_axis():
    text = (
        r"12 heads are not divisible by the 8 devices of axis 'tp': 12 % 8 = 4."
        r"\nhint: use 8 or 16 heads, or an axis of 1, 2, 3, 4, 6, 12 devices"
    )
    with jax.set_mesh(mesh_of(8)), pytest.raises(PlacementError, match=text):
        local_heads(12, axis="tp")
    with jax.set_mesh(mesh_of(4)), pytest.raises(PlacementError, match=r"2 kv heads are .*\nhint: use 4 kv heads, or"):
        local_heads(2, axis="tp", what="kv heads")

    def seen(x):
        return x + local_heads(12, axis="tp")

    assert local_map(seen, mesh=mesh_of(4), in_specs=P("tp"), out_specs=P("tp"))(jnp.zeros(4)).tolist() == [3] * 4
    with pytest.raises(PlacementError, match="12 heads are not divisible"):
        local_map(seen, mesh=mesh_of(8), in_specs=P("tp"), out_specs=P("tp"))(jnp.zeros(8))
    assert local_heads(12, axis="tp") == 12


def run_locally(f, specs, *args, ways=4):
    return local_map(f, mesh=mesh_of(ways), in_specs=specs, out_specs=P())(*args)


def test_whole_arguments_that_should_be_slices():
    v = values()
    text = r"{}: {} of shape .* is the same on every device of axis 'tp'; each needs its own slice.\nhint: name 'tp' in"
    whole = (P(), P(), P())
    dense, down = (v["x"], v["gate"], v["b_gate"]), (v["hidden"], v["down"], v["b_down"])
    calls = [
        ("column_dense", "w", lambda x, w, b: column_dense(x, w, axis="tp"), dense, whole),
        ("column_dense", "b", lambda x, w, b: column_dense(x, w, b[:6], axis="tp"), dense, (P(), UP, P())),
        ("row_dense", "w", lambda x, w, b: row_dense(x, w, b, axis="tp"), down, whole),
        ("vocab_embed", "table", lambda i, t: vocab_embed(i, t, axis="tp"), (v["ids"], v["table"]), whole[:2]),
        (
            "vocab_cross_entropy",
            "head",
            lambda x, h, t: vocab_cross_entropy(x, h, t, axis="tp"),
            (v["x"], v["head"], v["targets"]),
            whole,
        ),
    ]
    for who, name, f, args, specs in calls:
        with pytest.raises(PlacementError, match=text.format(who, name)):
            run_locally(f, specs, *args)


def test_sizes_that_the_axis_does_not_divide():
    v = values()
    with jax.set_mesh(mesh_of(8)):
        with pytest.raises(
            PlacementError,
            match=r"50 tokens of vocabulary cannot be split over 8 devices of axis 'tp': 50 % 8 = 2.\nhint: pad to 56",
        ):
            vocab_cross_entropy(v["x"], jnp.ones((DIM, 50)), v["targets"], axis="tp")
        with pytest.raises(PlacementError, match=r"vocab_embed: 50 tokens of vocabulary .*\nhint: pad to 56"):
            vocab_embed(v["ids"], jnp.ones((50, DIM)), axis="tp")
        with pytest.raises(PlacementError, match=r"vocab_embed: 12 rows cannot .*\nhint: pad to 16"):
            vocab_embed(v["ids"][:, :12], v["table"], axis="tp")
        with pytest.raises(PlacementError, match=r"column_dense: 12 rows cannot .*\nhint: pad to 16"):
            column_dense(v["x"][:, :12], v["gate"], axis="tp")
        with pytest.raises(PlacementError, match=r"column_dense: 12 output features cannot .*\nhint: pad to 16"):
            column_dense(v["x"], v["gate"][:, :12], axis="tp")
        with pytest.raises(PlacementError, match=r"row_dense: 12 input features cannot .*\nhint: pad to 16"):
            row_dense(v["hidden"][..., :12], v["down"][:12], axis="tp")  # fmt: skip


def test_shapes_that_do_not_fit():
    v = values()
    with pytest.raises(PlacementError, match=r"column_dense: cannot multiply x of shape \(2, 16, 6\) by .* \(24, 6\)"):
        column_dense(v["x"], v["down"], axis="tp")
    with pytest.raises(PlacementError, match=r"weight of shape \(24, 6\) and a bias of shape \(24,\) differ"):
        row_dense(v["hidden"], v["down"], v["b_up"], axis="tp")
    with pytest.raises(PlacementError, match="got 1 biases for 2 weights"):
        fused_column_dense(v["x"], (v["gate"], v["up"]), (v["b_up"],), axis="tp")
    with pytest.raises(PlacementError, match=r"x of shape \(2, 16, 6\) and scale of shape \(24,\) differ"):
        sequence_norm(v["x"], v["b_up"], axis="tp")
    with pytest.raises(PlacementError, match=r"ids must be .* of integers"):
        vocab_embed(v["x"], v["table"], axis="tp")
    with pytest.raises(PlacementError, match=r"needs targets of shape \(2, 16\); got \(2, 8\)"):
        vocab_cross_entropy(v["x"], v["head"], v["targets"][:, :8], axis="tp")
    with pytest.raises(PlacementError, match=r"needs targets of shape \(1, 16\); .*\nhint: pass targets for all rows"):
        local_map(
            lambda *a: vocab_cross_entropy(*a, axis="tp"), mesh=mesh_of(4), in_specs=(SPLIT, UP, SPLIT), out_specs=WHOLE
        )(v["x"], v["head"], v["targets"])
    with pytest.raises(PlacementError, match=r"vocab_size=41 for 40 columns.\nhint: use 1 to 40"):
        vocab_cross_entropy(v["x"], v["head"], v["targets"], axis="tp", vocab_size=41)


def test_no_axis_in_errors():
    v = values()
    with pytest.raises(PlacementError, match=r"hint: the bias must be \[24\]\.$"):
        column_dense(v["x"], v["gate"], v["b_down"], axis=None)
    with pytest.raises(PlacementError, match=r"hint: targets must have the shape of x without its last dim"):
        vocab_cross_entropy(v["x"], v["head"], v["targets"][:1], axis=None)


def test_options_without_effect_and_unknown_axes():
    v = values()
    for call in (
        lambda: column_dense(v["x"], v["gate"], axis="tp", sequence_parallel=False, form="ring"),
        lambda: row_dense(v["hidden"], v["down"], axis="tp", sequence_parallel=False, form="ring"),
        lambda: vocab_cross_entropy(v["x"], v["head"], v["targets"], axis="tp", sequence_parallel=False, form="ring"),
    ):
        with pytest.raises(PlacementError, match="form= would have no effect with sequence_parallel=False"):
            call()
    with jax.set_mesh(mesh_of(4)), pytest.raises(MeshError, match=r"sequence_norm names axis 'pt'; .*\nhint: did you"):
        sequence_norm(v["x"], v["scale"], axis="pt")
