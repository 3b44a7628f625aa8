"""The classic mistakes of sharded training: each is named with its cause, and with its line if it has one."""

import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import meshwright as mw
from meshwright import P
from meshwright.parallel import is_manual, pcast_varying, vocab_embed
from meshwright.verify import verify

RULES = mw.Rules([("up", P("fsdp", "tp")), ("down", P("tp", "fsdp")), ("bias", P())], optional_axes=("fsdp", "tp"))


def init(key):
    k_up, k_down = jax.random.split(key)
    up, down = jax.random.normal(k_up, (8, 16)) / 3, jax.random.normal(k_down, (16, 4)) / 4
    return {"up": up, "down": down, "bias": jnp.zeros(4)}


def make_batch(seed=0, rows=16):
    generator = np.random.default_rng(seed)
    x, y = (generator.standard_normal((rows, size)).astype(np.float32) for size in (8, 4))
    mask = ((generator.random(rows) < 0.5) | (np.arange(rows) % 2 == 1)).astype(np.float32)
    return {"x": x, "y": y, "mask": mask, "tokens": np.arange(rows, dtype=np.int32)}


def make_job(loss, **changes):
    given = {"init": init, "rules": RULES, "loss": loss, "batch": make_batch(), "local_axes": ("tp",)}
    return mw.Job(**given | changes)


def hidden(params, batch):
    return jnp.tanh(batch["x"] @ params["up"]) @ params["down"]


def squares(y, batch):
    return jnp.mean((y - batch["y"]) ** 2), {}


# --- The mistakes; each marks its line ---


def no_psum(params, batch, rng):
    return squares(hidden(params, batch) + params["bias"], batch)


def psum_over_a_misspelled_axis(params, batch, rng):
    h = hidden(params, batch)
    if is_manual("tp"):
        h = lax.psum(h, "pt")  # the mistake
    return squares(h + params["bias"], batch)


def psum_over_the_batch(params, batch, rng):
    h = hidden(params, batch)
    if is_manual("tp"):
        h = lax.psum(h, "dp")  # the mistake
    return squares(h + params["bias"], batch)


def summed_twice_before_a_nonlinearity(params, batch, rng):
    h = hidden(params, batch)
    if is_manual("tp"):
        h = lax.psum(lax.psum(h, "tp"), "tp")  # the mistake
    return squares(jnp.tanh(h) + params["bias"], batch)


def summed_twice_after_a_nonlinearity(params, batch, rng):
    h = hidden(params, batch)
    if is_manual("tp"):
        h = lax.psum(lax.psum(h, "tp"), "tp")  # the mistake
    return jnp.mean(h * batch["y"]), {}


@jax.custom_vjp
def sum_forward_and_backward(y):
    return lax.psum(y, "tp") if is_manual("tp") else y


def _backward(_, g):
    return (pcast_varying(lax.psum(pcast_varying(g, "tp"), "tp"), "tp") if is_manual("tp") else g,)


sum_forward_and_backward.defvjp(lambda y: (sum_forward_and_backward(y), None), _backward)


def gradient_summed_twice(params, batch, rng):
    h = sum_forward_and_backward(hidden(params, batch))  # the mistake
    return squares(h + params["bias"], batch)


def replicated_embedding(params, batch, rng):
    embedded = vocab_embed(batch["tokens"], params["embed"], axis="tp" if is_manual("tp") else None)
    return squares(embedded, batch)


def replicated_embedding_summed(params, batch, rng):
    embedded = params["embed"][batch["tokens"]]
    if is_manual("tp"):
        embedded = lax.psum(embedded, "tp")  # the mistake
    return squares(embedded, batch)


def same_key(params, batch, rng):
    h = hidden(params, batch)
    if rng is not None:
        plain = jax.random.wrap_key_data(jax.random.key_data(rng)[:2], impl="threefry2x32")
        h = h * jax.random.bernoulli(plain, 0.5, h.shape)  # the mistake
    return squares(h, batch)


def key_of_its_own(params, batch, rng):
    h = hidden(params, batch)
    h = h * jax.random.bernoulli(jax.random.key(7), 0.5, h.shape)  # the mistake
    return squares(h, batch)


def no_weights(params, batch, rng):
    errors = ((hidden(params, batch) - batch["y"]) ** 2).sum(-1)
    return (errors * batch["mask"]).sum() / batch["mask"].sum(), {}


EMBED = {"init": lambda key: {"embed": jax.random.normal(key, (64, 4))}, "rules": [("embed", P())]}


def verified(loss, mesh="dp:2,tp:4", **changes):
    report = verify(make_job(loss, **changes), meshes=mesh, views="local", num_steps=1)
    assert not report.ok
    return str(report)


def wrong_axis_in_a_rule():
    rules = [("up", P("fsdp", "pt")), ("down", P("tp", "fsdp")), ("bias", P())]
    return verified(no_psum, "dp:2,fsdp:1,tp:4", rules=rules)


def large_embedding_left_whole():
    tree = {"embed": jax.ShapeDtypeStruct((1 << 17, 256), "float32")}
    with pytest.warns(mw.MeshwrightWarning) as warned:
        mw.make_layout([("embed", P())], tree, mw.create_mesh("tp:8"))
    return str(warned[0].message)


def donated_state():
    job = make_job(no_weights)
    layout = mw.state_layout(job, optax.sgd(0.1), mw.create_mesh("dp:8"))
    state = mw.init_state(job, optax.sgd(0.1), layout, jax.random.key(0))
    step = mw.make_train_step(job, optax.sgd(0.1), layout)
    step(state, make_batch())
    with pytest.raises(mw.MeshwrightError) as raised:
        step(state, make_batch())
    return str(raised.value)


def batch_of_each_host():
    """A batch from no seed; tests/distributed/test_same_batch.py has one that depends on the rank."""
    with pytest.raises(mw.MeshwrightError) as raised:
        verify(make_job(no_weights, make_batch=lambda seed: make_batch(np.random.default_rng().integers(1 << 30))))
    return str(raised.value)


def line_of(function):
    lines, first = inspect.getsourcelines(function)
    return f"test_mistakes.py:{first + next(number for number, line in enumerate(lines) if '# the mistake' in line)}"


MISTAKES = {
    "missing psum": (no_psum, "likely cause: a psum over `tp` is missing.*The loss never sums over it"),
    "wrong axis in a rule": (
        wrong_axis_in_a_rule, "`params/up` .*P('fsdp', 'pt') names axis 'pt'; the mesh has axes.*did you mean 'tp'",
    ),
    "misspelled axis in psum": (
        psum_over_a_misspelled_axis, "`psum` at .*LINE uses axis `pt`, which the mesh dp=2 x tp=4 does not have",
    ),
    "another axis in psum": (
        psum_over_the_batch, "likely cause: the sum at .*LINE runs over `dp`, which splits the batch.*sum over `tp`",
    ),
    "double-counted before a nonlinearity": (
        summed_twice_before_a_nonlinearity,
        "likely cause: the sum at .*LINE adds values that are already equal on all 4 devices of `tp`",
    ),
    "double-counted after a nonlinearity": (
        summed_twice_after_a_nonlinearity,
        "likely cause: the loss is 4x the single-device value: summed twice over `tp` .*The sum at .*LINE adds",
    ),
    "double-counted gradient": (
        gradient_summed_twice,
        "likely cause: the gradient of `down` is 4x the single-device value: summed twice over `tp` .*at .*LINE adds",
    ),
    "replicated embedding, split lookup": (
        lambda: verified(replicated_embedding, **EMBED),
        "vocab_embed: table of shape (64, 4) is the same on every device of axis 'tp'; each needs its own slice",
    ),
    "replicated embedding, summed": (
        lambda: verified(replicated_embedding_summed, **EMBED),
        "likely cause: the sum at .*LINE adds values that are already equal on all 4 devices of `tp`",
    ),
    "replicated embedding, in the layout": (
        large_embedding_left_whole, "embed .*is replicated on every device: 128.0 MiB each",
    ),
    "same random key on every device": (
        lambda: verified(same_key, "dp:8"), "likely cause: every device draws the same random numbers at .*LINE",
    ),
    "a constant random key": (
        lambda: verified(key_of_its_own, "dp:8"),
        "likely cause: the random numbers at .*LINE come from a key of their own",
    ),
    "forgotten weighting": (
        lambda: verified(no_weights, "dp:8"),
        "likely cause: the loss is an unweighted mean over 8 devices, but they hold different numbers of valid",
    ),
    "donated state reused": (donated_state, "donated"),
    "host-dependent batch": (batch_of_each_host, "`make_batch` returns another batch each time, so every host"),
}  # fmt: skip
MARKED = {
    "replicated embedding, summed": replicated_embedding_summed,
    "same random key on every device": same_key,
    "a constant random key": key_of_its_own,
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named(name):
    make, pattern = MISTAKES[name]
    takes_params = "params" in inspect.signature(make).parameters
    text = verified(make) if takes_params else make()
    if "LINE" in pattern:
        pattern = pattern.replace("LINE", line_of(MARKED.get(name, make)))
    escaped = ".*".join(re.escape(part) for part in pattern.split(".*"))
    assert re.search(f"(?s){escaped}", text), text
