"""A split backward pass computes nothing twice: each matmul has one product in each of the three parts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import meshwright as mw
from meshwright.mesh.axes import pcast_varying, varying_axes
from meshwright.parallel.pipeline.split_backward import read, run_ops, split_jaxpr
from meshwright.parallel.pipeline.stage_backward import split_stage

LAYERS, WIDTH, HIDDEN = 3, 4, 6


def layer(h, w, mask):
    return h + jnp.tanh((h * w["scale"]) @ w["up"]) @ w["down"] * mask


FORMS = {
    "scan": lambda h, ws, mask: lax.scan(lambda h, w: (layer(h, w, mask), None), h, ws)[0],
    "scan of checkpoints": lambda h, ws, mask: lax.scan(lambda h, w: (jax.checkpoint(layer)(h, w, mask), None), h, ws)[
        0
    ],
    "written out": lambda h, ws, mask: layer(
        jax.jit(layer)(h, jax.tree.map(lambda leaf: leaf[0], ws), mask), jax.tree.map(lambda leaf: leaf[1], ws), mask
    ),
}


def count_dots(jaxpr):
    total = 0
    for eqn in jaxpr.eqns:
        total += eqn.primitive.name == "dot_general"
        for value in eqn.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                total += count_dots(inner) * (eqn.params["length"] if eqn.primitive.name == "scan" else 1)
    return total


@pytest.mark.parametrize("form", FORMS)
def test_parts_equal_the_whole_and_share_no_matmuls(form):
    keys = jax.random.split(jax.random.key(0), 5)
    ws = {
        "down": jax.random.normal(keys[0], (LAYERS, HIDDEN, WIDTH)),
        "scale": jnp.ones((LAYERS, WIDTH)),
        "up": jax.random.normal(keys[1], (LAYERS, WIDTH, HIDDEN)),
    }
    x, dy = (jax.random.normal(key, (2, WIDTH)) for key in keys[2:4])
    mask = jnp.float32(0.5)

    def function(free, x, dy):
        *leaves, mask = free
        tree = dict(zip(sorted(ws), leaves, strict=True))
        y, pull = jax.vjp(lambda tree, h: FORMS[form](h, tree, mask), tree, x[0])
        grads, dx = pull(dy[0])
        return [y, dx, *jax.tree.leaves(grads)]

    free = [*jax.tree.leaves(ws), mask]
    stage = split_stage(function, free, [x], [dy], splits=True, saves=True)

    def forward(free, x):
        env = stage.start(free, x)
        return stage.run_forward(env), [read(env, var) for var in stage.saved]

    def inputs(free, saved, dy):
        env = stage.start(free)
        env.update(zip(stage.saved, saved, strict=True))
        dx, early = stage.run_inputs(env, dy)
        return dx, early, [env[var] for var in stage.kept]

    def weights(free, saved, kept):
        env = stage.start(free)
        env.update(zip([*stage.saved, *stage.kept], [*saved, *kept], strict=True))
        return stage.run_weights(env)

    (y,), saved = forward(free, [x])
    (dx,), early, kept = inputs(free, saved, [dy])
    late = weights(free, saved, kept)
    grads = [one if other is None else other for one, other in zip(early, late, strict=True)]
    for got, expected in zip([y, dx, *grads], function(free, [x], [dy]), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)

    num_layers = 2 if form == "written out" else LAYERS
    dots = [
        count_dots(jax.make_jaxpr(part)(*arguments).jaxpr)
        for part, arguments in ((forward, (free, [x])), (inputs, (free, saved, [dy])), (weights, (free, saved, kept)))
    ]
    again = num_layers if form == "scan of checkpoints" else 0  # the product inside tanh
    assert dots == [2 * num_layers, 2 * num_layers + again, 2 * num_layers]
    # Nothing the size of a weight is saved.
    assert all(leaf.shape[-2:] not in {(WIDTH, HIDDEN), (HIDDEN, WIDTH)} for leaf in [*saved, *kept])
    assert stage.early == (False,) * 3


def test_a_value_of_another_tick_may_vary_along_the_pipeline_already():
    """Results of GPU kernels are traced as replicated and marked; buffers between ticks mark them before that."""
    seen = []

    def device(x):
        jaxpr = jax.make_jaxpr(lambda x: pcast_varying(x, ("pp", "fsdp")))(x).jaxpr
        env = {jaxpr.invars[0]: pcast_varying(x, "pp")}
        run_ops(split_jaxpr(jaxpr, [True]).first, env)
        seen.append(varying_axes(env[jaxpr.outvars[0]]))
        return lax.pmax(env[jaxpr.outvars[0]], ("pp", "fsdp"))

    run = mw.parallel.local_map(device, mesh=mw.create_mesh("pp:2,fsdp:4"), in_specs=mw.P(), out_specs=mw.P())
    assert jax.jit(run)(jnp.arange(3.0)).tolist() == [0, 1, 2]
    assert seen == [{"pp", "fsdp"}]
