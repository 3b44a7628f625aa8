"""Each cause on arrays that show it, and on similar arrays that do not."""

import math
import re

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

import meshwright as mw
from meshwright import P
from meshwright.errors import TreeError
from meshwright.verify.compare import Ratio, compare, ratio_of
from meshwright.verify.diagnose import causes

SIZES = {"dp": 2, "fsdp": 1, "tp": 4}


def constant(value):
    return Ratio(value, value, value, 10)


@pytest.fixture(scope="module")
def leaf():
    return np.random.default_rng(0).standard_normal((8, 16)).astype(np.float32)


def blocks(spec, shape, mesh="dp:2,tp:4"):
    return NamedSharding(mw.create_mesh(mesh), spec).devices_indices_map(shape)


# --- Comparing ---


def test_the_worst_element_of_the_worst_leaf(leaf):
    wrong = leaf.copy()
    wrong[3, 5] += 1
    found = compare("gradients", {"a": leaf, "b": leaf}, {"a": leaf, "b": wrong}, tolerance=1e-5)
    assert not found.ok
    assert (found.num_leaves, found.num_different, found.different) == (2, 1, ("b",))
    assert (found.worst.path, found.worst.index) == ("b", (3, 5))
    assert found.worst.error == pytest.approx(1 / np.abs(leaf).max(), rel=1e-5)
    assert re.fullmatch(r"`b`\[3\]\[5\]: \S+ on one device, \S+ on the mesh", str(found.first))


@pytest.mark.parametrize(
    ("expected", "got", "least", "ok"),
    [
        (np.zeros(4), np.full(4, 1e-9), 1e-2, True),  # zero up to rounding
        (np.zeros(4), np.full(4, 1e-3), 1e-2, False),
        (np.zeros(4), np.zeros(4), 0.0, True),
        (np.zeros(4), np.full(4, 1e-30), 0.0, False),
        (np.array([1.0, np.nan]), np.array([1.0, np.nan]), 0.0, True),
        (np.array([1.0, np.inf]), np.array([1.0, np.inf]), 0.0, True),
        (np.array([1.0, 2.0]), np.array([1.0, np.nan]), 0.0, False),
        (np.array([1.0, 2.0]), np.array([1.0, np.inf]), 0.0, False),
        (np.zeros((0, 3)), np.zeros((0, 3)), 0.0, True),
    ],
)
def test_zeros_and_non_finite_elements(expected, got, least, ok):
    assert compare("x", {"x": expected}, {"x": got}, tolerance=1e-5, least_scale=least).ok is ok


def test_a_tolerance_of_zero_requires_equal_bits(leaf):
    assert compare("x", {"x": leaf}, {"x": leaf.copy()}, tolerance=0.0).ok
    assert not compare("x", {"x": leaf}, {"x": np.nextafter(leaf, np.inf)}, tolerance=0.0).ok
    assert not compare("x", {"x": np.float32(0.0)}, {"x": np.float32(-0.0)}, tolerance=0.0).ok


@pytest.mark.parametrize(
    ("measured", "text"),
    [({"b": np.ones(2)}, "the mesh and one device have different leaves: a, b"), ({"a": np.ones(3)}, r"\(3,\)")],
)
def test_different_trees(measured, text):
    with pytest.raises(TreeError, match=text):
        compare("gradients", {"a": np.ones(2)}, measured, tolerance=1e-5)


def test_ratios(leaf):
    assert ratio_of(leaf, 4 * leaf).is_constant
    assert ratio_of(leaf, 4 * leaf).median == pytest.approx(4)
    assert not ratio_of(leaf, leaf + 1).is_constant
    assert str(ratio_of(leaf, 4 * leaf)).startswith("4 in all ")
    assert str(ratio_of(leaf, leaf + 1)).startswith("from ")
    assert str(ratio_of(np.float32(2), np.float32(3))) == "1.5"
    assert ratio_of(np.zeros(3), np.ones(3)) is None
    assert ratio_of(np.ones(3), np.full(3, np.nan)) is None


# --- Sums over devices ---


@pytest.mark.parametrize(
    ("ratio", "text"),
    [
        (4.0, r"is 4x the single-device value: summed twice over `tp` \(4 devices\), or a mean became a sum"),
        (2.0, r"is 2x the single-device value: summed twice over `dp` \(2 devices\)"),
        (8.0, r"is 8x the single-device value: summed twice over `dp` x `tp` \(8 devices\)"),
        (0.25, r"is 1/4 of the single-device value: not summed over `tp` \(4 devices\), or a sum became a mean"),
        (16.0, r"is 16x the single-device value \(4 squared, so the error is squared later\): summed twice over `tp`"),
        (1 / 64, r"is 1/64 of the single-device value \(8 squared"),
    ],
)
def test_a_ratio_names_its_axes(ratio, text):
    cause = causes.reduction(constant(ratio), SIZES, what="the loss")
    assert cause.kind == "reduction"
    assert re.search(text, cause.text), cause.text


@pytest.mark.parametrize("ratio", [None, constant(1.0), constant(3.0), constant(-4.0), Ratio(4.0, 3.0, 5.0, 10)])
def test_ratios_without_a_cause(ratio):
    assert causes.reduction(ratio, SIZES, what="the loss") is None


def test_axes_of_equal_size_are_all_named():
    cause = causes.reduction(constant(2.0), {"dp": 2, "tp": 2}, what="the loss")
    assert "over `dp` or `tp` (2 devices)" in cause.text


def test_copies_that_differ():
    mesh = mw.create_mesh("dp:2,tp:4")
    sharding = NamedSharding(mesh, P("tp"))
    place = {device: index for index, device in np.ndenumerate(mesh.devices)}

    def made(value):
        parts = [
            jax.device_put(np.full((2,), value(*place[device]), np.float32), device) for device in mesh.devices.flat
        ]
        return jax.make_array_from_single_device_arrays((8,), sharding, parts)

    assert causes.copies_along(made(lambda dp, tp: tp), allowed=1e-6) == ()
    assert causes.copies_along(made(lambda dp, tp: tp + dp), allowed=1e-6) == ("dp",)
    assert causes.copies_along(made(lambda dp, tp: tp + dp), allowed=2.0) == ()
    assert causes.copies("the loss", ()) is None
    assert "along `dp`, but the copies differ" in causes.copies("the loss", ("dp",)).text


def test_one_block_of_rows(leaf):
    by_device = [leaf, leaf[::-1], 2 + leaf]
    cause = causes.one_block_of_rows(leaf[::-1] / 3, by_device, ["dp", "fsdp"], what="the gradient", tolerance=1e-5)
    expected = "covers only the rows of device 1 of 3 (times 0.3333): a reduction over `dp` x `fsdp` is missing"
    assert expected in cause.text
    whole = sum(by_device) / 3
    assert causes.one_block_of_rows(whole, by_device, ["dp"], what="the gradient", tolerance=1e-5) is None
    # If the rows of all devices have the same gradient, or the value is a scalar, a match means nothing.
    assert causes.one_block_of_rows(leaf / 2, [leaf, leaf], ["dp"], what="the gradient", tolerance=1e-5) is None
    losses = [np.float32(1.5), np.float32(2.5)]
    assert causes.one_block_of_rows(np.float32(2.0), losses, ["dp"], what="the loss", tolerance=1e-5) is None
    assert "device 1 of 2" in causes.one_block_of_rows(losses[1], losses, ["dp"], what="the loss", tolerance=1e-5).text


def test_mean_of_means():
    def cause(measured, reference, blocks):
        return causes.mean_of_means(measured, reference, blocks, tolerance=1e-5, blocks="2 devices")

    assert "(sum, count) pair" in cause(2.0, 1.5, [1.0, 3.0]).fix
    assert cause(2.0, 2.0, [1.0, 3.0]) is None  # the losses agree
    assert cause(1.7, 1.5, [1.0, 3.0]) is None  # they differ for another reason
    assert cause(math.nan, 1.5, [1.0, 3.0]) is None
    assert cause(2.0, 1.5, []) is None


# --- Shards of a leaf ---


def test_one_part(leaf):
    wrong = leaf.copy()
    wrong[:, 12:] = 0
    held = blocks(P(None, "tp"), leaf.shape)
    cause = causes.one_part(leaf, wrong, held, allowed=1e-5, what="`w`")
    devices = mw.create_mesh("dp:2,tp:4").devices[:, 3]
    assert f"differs only in [0:8, 12:16], 1 of its 4 shards (on {devices[0]}, {devices[1]})." in cause.text
    assert causes.one_part(leaf, leaf, held, allowed=1e-5, what="`w`") is None
    assert causes.one_part(leaf, -leaf, held, allowed=1e-5, what="`w`") is None
    assert causes.one_part(leaf, wrong, blocks(P(), leaf.shape), allowed=1e-5, what="`w`") is None


def test_an_optimizer_that_sees_shards(leaf):
    held = {"w": blocks(P(None, "tp"), leaf.shape)}
    by_slice = leaf.copy()
    for part in range(4):  # divide each slice by its own norm, as layerwise scaling on slices would
        piece = slice(4 * part, 4 * part + 4)
        by_slice[:, piece] = leaf[:, piece] / np.linalg.norm(leaf[:, piece])
    whole = leaf / np.linalg.norm(leaf)
    options = {"after_one_step": False, "allowed": {"w": 1e-6}}
    cause = causes.optimizer({"w": whole}, {"w": by_slice}, held, **options)
    assert "the update of each shard of `w` is off by a different factor" in cause.text
    other = causes.optimizer({"w": whole}, {"w": whole + 1}, held, **options)
    assert "the optimizer sees shards, or uses more than gradients" in other.text
    later = causes.optimizer({"w": whole}, {"w": whole}, held, after_one_step=True, allowed={"w": 1e-6})
    assert "rounding errors grow" in later.text


# --- Other causes ---


def test_not_finite():
    cause = causes.not_finite(np.ones(4), np.array([1, np.nan, np.inf, 1]), what="the loss")
    assert "2 of 4 elements of the loss are finite on one device but not on the mesh" in cause.text
    assert causes.not_finite(np.full(2, np.nan), np.full(2, np.nan), what="the loss") is None


def test_initial_parameters():
    assert "reads the mesh or a device index" in causes.initial(repeatable=True).text
    assert "uses more than its key" in causes.initial(repeatable=False).text


@pytest.mark.parametrize(
    ("agrees", "text"),
    [
        ({"tp": False}, "the error is in the computation over `tp`"),
        ({"dp": True, "tp": False}, "it also differs with `tp` alone, and agrees with `dp` alone"),
        ({"dp": True, "tp": True}, "the error needs several axes"),
    ],
)
def test_axes_alone(agrees, text):
    assert text in causes.axes_alone(agrees).text


@pytest.mark.parametrize(
    ("outcomes", "axes"),
    [
        ([({"dp": 8}, True), ({"dp": 2, "tp": 4}, False)], ("tp",)),
        ([({"dp": 8, "tp": 1}, True), ({"fsdp": 2, "tp": 4}, False)], ("fsdp", "tp")),
        ([({"dp": 8}, False), ({"tp": 8}, False)], ()),
        ([({"tp": 8}, False)], ()),
        ([({"tp": 8}, True), ({"tp": 4, "dp": 2}, False)], ("dp",)),
    ],
)
def test_guilty_axes(outcomes, axes):
    assert causes.guilty_axes(outcomes) == axes
