"""Mistakes in a job that `verify` finds, and the cause that it names."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import meshwright as mw
from meshwright import P
from meshwright.parallel import is_manual, pcast_varying
from meshwright.verify import verify
from meshwright.verify.measure import SharedInputs

from .small_job import init, linear, make_job, model, one_case, squares, sum_over_tp, sum_twice


def mean_over_tp(y):
    return lax.pmean(y, "tp") if is_manual("tp") else y


@jax.custom_vjp
def sum_both_ways(y):
    return sum_over_tp(y)


def _sum_back(_, g):
    return (pcast_varying(lax.psum(pcast_varying(g, "tp"), "tp"), "tp") if is_manual("tp") else g,)


sum_both_ways.defvjp(lambda y: (sum_over_tp(y), None), _sum_back)


def dropout_by_device(params, batch, rng):
    h = model(params, batch["x"])
    if rng is not None:
        rng = jax.random.fold_in(rng, lax.axis_index("dp")) if is_manual("dp") else rng
        h = h * jax.random.bernoulli(rng, 0.5, h.shape)
    return jnp.mean((h - batch["y"]) ** 2), {}


def mean_over_mask(params, batch, rng):
    errors = ((model(params, batch["x"]) - batch["y"]) ** 2).sum(-1)
    return (errors * batch["mask"]).sum() / batch["mask"].sum(), {}


def gradient_of_the_first_rows(params, batch, rng):
    value, _ = squares(params, batch, rng)
    if is_manual("dp"):
        value = jnp.where(lax.axis_index("dp") == 0, value, lax.stop_gradient(value))
    return value, {}


def no_gradient_of_the_last_slice(params, batch, rng):
    h = jnp.tanh(batch["x"] @ params["up"])
    if is_manual("tp"):
        h = jnp.where(lax.axis_index("tp") == 3, lax.stop_gradient(h), h)
    return jnp.mean((sum_over_tp(h @ params["down"]) + params["bias"] - batch["y"]) ** 2), {}


def unsummed_copies(params, batch, rng):
    mesh = mw.current_mesh()
    if mesh.shape["dp"] == 1:
        return squares(params, batch, rng)
    own = jax.shard_map(
        lambda params, batch: squares(params, batch, None)[0],
        in_specs=(P(), P("dp")),
        out_specs=P(),
        axis_names={"dp"},
        check_vma=False,
    )
    return own(params, batch), {}


def nothing_counts_on_some_devices(params, batch, rng):
    return mean_over_mask(params, batch | {"mask": (batch["y"][:, 0] > 1.0).astype(jnp.float32)}, rng)


BROKEN = {
    "psum twice": (
        functools.partial(linear, reduce=sum_twice), "dp:2,tp:4", "local", 1,
        "reduction", "the loss is 4x the single-device value: summed twice over `tp` (4 devices)",
    ),
    "pmean for psum": (
        functools.partial(linear, reduce=mean_over_tp), "dp:2,tp:4", "local", 1,
        "reduction", "the loss is 1/4 of the single-device value: not summed over `tp` (4 devices)",
    ),
    "psum twice, then squared": (
        functools.partial(squares, reduce=sum_twice), "dp:2,tp:4", "local", 1,
        "reduction", "adds values that are already equal on all 4 devices of `tp`: its result is 4x too large",
    ),
    "pmean for psum, then squared": (
        functools.partial(squares, reduce=mean_over_tp), "dp:2,tp:4", "local", 1,
        "axis", "it also differs with `tp` alone, and agrees with `dp` alone",
    ),
    "psum in the backward pass": (
        functools.partial(squares, reduce=sum_both_ways), "dp:2,tp:4", "local", 1,
        "reduction", "the gradient of `down` is 4x the single-device value: summed twice over `tp` (4 devices)",
    ),
    "dropout by device": (
        dropout_by_device, "dp:8", "local", 1,
        "random numbers", "the results agree without a random key (rng=None), so the random numbers at tests/verify/",
    ),
    "mean over a device's mask": (
        mean_over_mask, "dp:4", "local", 1,
        "mean of means", "the loss is an unweighted mean over 4 devices",
    ),
    "mean over a minibatch's mask": (
        mean_over_mask, "dp:2", "global", 2,
        "mean of means", "the loss is an unweighted mean over 2 minibatches",
    ),
    "nothing counts on some devices": (
        nothing_counts_on_some_devices, "dp:8", "local", 1,
        "not finite", "1 of 1 elements of the loss are finite on one device but not on the mesh",
    ),
    "gradients of some rows": (
        gradient_of_the_first_rows, "dp:4,tp:2", "local", 1,
        "rows", "the gradient of `bias` covers only the rows of device 0 of 4 (times 0.25): a reduction over `dp`",
    ),
    "gradients of some slices": (
        no_gradient_of_the_last_slice, "dp:2,tp:4", "local", 1,
        "one part", "the gradient of `up` differs only in [0:8, 12:16], 1 of its 4 shards",
    ),
    "copies that differ": (
        unsummed_copies, "dp:8", "global", 1,
        "copies", "the loss should be identical on all devices along `dp`, but the copies differ",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_the_cause_of_a_broken_job_is_named(name):
    loss, mesh, view, num_minibatches, kind, text = BROKEN[name]
    case = one_case(make_job(loss), mesh, view, num_minibatches=num_minibatches)
    assert case.verdict == "different"
    assert case.causes[0].kind == kind
    assert text in case.causes[0].text
    assert case["initial parameters"].ok
    if case["loss"].ok:
        assert case.causes[1].kind == "backward"


def test_an_init_that_is_not_a_function_of_its_key():
    def by_chance(key):
        return init(key) | {"bias": jnp.full(4, np.random.default_rng().random())}

    case = one_case(make_job(init=by_chance), "fsdp:4,tp:2", "global")
    assert case.verdict == "different"
    assert "init returns different parameters each time it is compiled" in case.causes[0].text
    assert case["initial parameters"].different == ("bias",)
    # The step starts from the same parameters on both sides.
    assert case["gradients"].ok
    assert case["parameters"].ok


def test_an_init_that_depends_on_the_mesh(monkeypatch):
    place, meshes = SharedInputs.place, []

    def place_and_record(inputs, mesh, **options):
        meshes.append(mesh)
        return place(inputs, mesh, **options)

    monkeypatch.setattr(SharedInputs, "place", place_and_record)

    def by_mesh(key):
        return init(key) | {"bias": jnp.full(4, float(meshes[-1].size))}

    case = one_case(make_job(init=by_mesh), "fsdp:4,tp:2", "global")
    assert "init returns different parameters on this mesh" in case.causes[0].text


def test_a_step_that_cannot_be_traced_is_a_failed_case():
    job = make_job(functools.partial(squares, reduce=lambda y: y))
    report = verify(job, meshes=["dp:2,tp:4", "dp:8"], views="local", num_steps=1)
    assert [case.verdict for case in report.cases] == ["failed", "equal"]
    assert "the loss varies along 'tp', but is summed only over 'dp'" in report.cases[0].message
    assert report.cases[0].causes[0].kind == "missing sum"
    assert "a psum over `tp` is missing" in str(report)
    assert "every mesh that differs has `tp`, and no mesh that agrees does" in str(report)
    with pytest.raises(
        mw.MeshwrightError, match=r"(?s)differs from the single-device step.*FAILED.*hint: if each device"
    ):
        report.require()
