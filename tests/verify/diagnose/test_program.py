"""Sums and draws of a program: which values differ between devices, whatever marks they carry."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import meshwright as mw
from meshwright import P
from meshwright.parallel import local_map, pcast_varying
from meshwright.verify.diagnose.program import BATCH, RNG, read_program


def read(function, *args, specs, labels=None):
    mapped = local_map(function, mesh=mw.create_mesh("dp:2,tp:4"), in_specs=specs, out_specs=P(("dp", "tp")))
    jaxpr = jax.make_jaxpr(mapped)(*args)
    return read_program(jaxpr, labels or [frozenset()] * len(args))


X = jnp.ones((8, 8))


def everywhere(x):
    return pcast_varying(x, ("dp", "tp"))


@pytest.mark.parametrize(
    ("function", "of_equals"),
    [
        (lambda x, w: lax.psum(x @ w, "tp"), [()]),
        (lambda x, w: lax.psum(pcast_varying(x, "tp"), "tp"), [("tp",)]),
        (lambda x, w: lax.psum(lax.all_gather(w, "tp", axis=1, tiled=True), "tp"), [("tp",)]),
        (lambda x, w: lax.psum(x * lax.axis_index("tp"), "tp"), [()]),
        (lambda x, w: lax.psum(pcast_varying(x, "tp"), ("dp", "tp")), [("tp",)]),
        (lambda x, w: jnp.ones_like(x), []),
        # Through loops, branches, checkpoints and calls:
        (lambda x, w: lax.scan(lambda c, _: (c + w, lax.psum(c, "tp")), jnp.zeros_like(w), length=2)[1][0], [()]),
        (
            lambda x, w: lax.scan(
                lambda c, _: (c + 1, lax.psum(pcast_varying(c, "tp"), "tp")), jnp.zeros_like(x), length=2
            )[1][0],
            [("tp",)],
        ),
        (lambda x, w: lax.psum(lax.fori_loop(0, 3, lambda _, c: c + w, jnp.zeros_like(w)), "tp"), [()]),
        (lambda x, w: lax.psum(jax.checkpoint(jnp.sin)(w), "tp"), [()]),
        (lambda x, w: lax.psum(jax.jit(lambda y: pcast_varying(y, "tp"))(x), "tp"), [("tp",)]),
        (
            lambda x, w: lax.psum(lax.cond(lax.axis_index("tp") > 0, jnp.sin, jnp.cos, pcast_varying(x, "tp")), "tp"),
            [()],
        ),
    ],
)
def test_sums(function, of_equals):
    program = read(lambda x, w: everywhere(function(x, w)), X, X, specs=(P("dp"), P(None, "tp")))
    assert [one.of_equals for one in program.sums] == of_equals
    assert all("test_program.py:" in one.line for one in program.sums)


def test_sums_of_the_backward_pass_have_lines_too():
    def loss(x, w):
        return lax.psum((x @ w).sum(), ("dp", "tp"))

    program = read(lambda x, w: everywhere(jax.grad(loss)(x, w)), X, X, specs=(P("dp"), P(None, "tp")))
    # The last sum is the gradient of x, which is whole along tp: a sum of partial products.
    assert [(one.axes, one.of_equals) for one in program.sums] == [(("dp", "tp"), ()), (("tp",), ())]


@pytest.mark.parametrize(
    ("make_key", "varies", "has_key"),
    [
        (lambda rng, x: rng, (), True),
        (lambda rng, x: jax.random.fold_in(rng, lax.axis_index("dp")), ("dp",), True),
        (lambda rng, x: jax.random.key(0), (), False),
        (lambda rng, x: jax.random.fold_in(jax.random.key(0), x[0, 0].astype(int)), ("dp",), True),  # from the batch
    ],
)
def test_draws(make_key, varies, has_key):
    def draw(rng, x):
        return everywhere(x * jax.random.normal(make_key(rng, x), x.shape))

    labels = [frozenset((RNG,)), frozenset((BATCH,))]
    program = read(draw, jax.random.key(0), X, specs=(P(), P("dp")), labels=labels)
    last = program.draws[-1]
    assert (last.varies, last.has_key) == (varies, has_key)
    assert "test_program.py:" in last.line
