"""A small job with dense layers, which tests of `verify` change and break."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import meshwright as mw
from meshwright import P
from meshwright.parallel import is_manual
from meshwright.verify import verify

RULES = mw.Rules([("up", P("fsdp", "tp")), ("down", P("tp", "fsdp")), ("bias", P())], optional_axes=("fsdp", "tp"))


def init(key):
    k_up, k_down = jax.random.split(key)
    up, down = jax.random.normal(k_up, (8, 16)) / 3, jax.random.normal(k_down, (16, 4)) / 4
    return {"up": up, "down": down, "bias": jnp.zeros(4)}


def some_batch(rows=16):
    generator = np.random.default_rng(0)
    x, y = (generator.standard_normal((rows, size)).astype(np.float32) for size in (8, 4))
    # The last of every four rows counts, so that every device has a valid row.
    mask = ((generator.random(rows) < 0.5) | (np.arange(rows) % 4 == 3)).astype(np.float32)
    return {"x": x, "y": y, "mask": mask}


def sum_over_tp(y):
    return lax.psum(y, "tp") if is_manual("tp") else y


def model(params, x, reduce=sum_over_tp):
    return reduce(jnp.tanh(x @ params["up"]) @ params["down"]) + params["bias"]


def squares(params, batch, rng, reduce=sum_over_tp):
    return jnp.mean((model(params, batch["x"], reduce) - batch["y"]) ** 2), {}


def linear(params, batch, rng, reduce=sum_over_tp):
    return jnp.mean(model(params, batch["x"], reduce) * batch["y"]), {}


def make_job(loss=squares, **changes):
    given = {"init": init, "rules": RULES, "loss": loss, "batch": some_batch(), "local_axes": ("tp",)}
    return mw.Job(**given | changes)


def one_case(job, mesh, view, **options):
    (case,) = verify(job, meshes=mesh, views=view, num_steps=2, **options).cases
    return case


def sum_twice(y):
    return lax.psum(lax.psum(y, "tp"), "tp") if is_manual("tp") else y
