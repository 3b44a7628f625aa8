"""A tiny model with an embedding, layers and a head, and its loss and gradients on one device. Imported by tests."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import meshwright as mw
from meshwright.parallel.dropout import dropout
from meshwright.parallel.row_keys import row_key

VOCAB, WIDTH, HIDDEN, LAYERS = 11, 8, 16, 8


def make_params(num_layers=LAYERS):
    keys = jax.random.split(jax.random.key(0), 4)
    return {
        "embed": jax.random.normal(keys[0], (VOCAB, WIDTH)),
        "layers": {
            "up": jax.random.normal(keys[1], (num_layers, WIDTH, HIDDEN)) / 4,
            "down": jax.random.normal(keys[2], (num_layers, HIDDEN, WIDTH)) / 4,
            "scale": jnp.linspace(0.5, 1.5, num_layers * WIDTH).reshape(num_layers, WIDTH),
            "number": jnp.arange(num_layers),
        },
        "head": jax.random.normal(keys[3], (WIDTH, VOCAB)),
    }


def make_batch(rows):
    tokens = jax.random.randint(jax.random.key(1), (rows, 3), 0, VOCAB)
    mask = jax.random.bernoulli(jax.random.key(2), 0.7, (rows, 3)).astype(jnp.float32)
    gain = jnp.linspace(0.5, 2.0, rows).reshape(rows, 1, 1)  # an extra argument that every layer uses
    return {"tokens": tokens, "gain": gain, "targets": jnp.flip(tokens, 1), "mask": mask}


def layer(p, h, gain, *, rng=None, tp=None):
    """One residual layer that ends with x/|x|, whose gradient is NaN on the zeros of an empty pipeline."""
    inner = jnp.tanh((h * gain * p["scale"]) @ p["up"]) @ p["down"]
    inner = lax.psum(inner, tp) if tp else inner
    if rng is not None:
        inner = dropout(inner, 0.3, jax.random.fold_in(rng, p["number"]))
    h = h + inner
    return h / jnp.sqrt((h**2).sum(-1, keepdims=True))


def stage(params, h, gain, **options):
    return lax.scan(lambda h, p: (layer(p, h, gain, **options), None), h, params)[0]


def embed(table, tokens):
    return table[tokens]


def head_loss(head, h, batch):
    """The head is a matrix, or the table of the embedding in a dict."""
    logits = jax.nn.log_softmax(h @ (head["table"].T if isinstance(head, dict) else head))
    picked = jnp.take_along_axis(logits, batch["targets"][..., None], -1)[..., 0]
    return -(picked * batch["mask"]).sum()


def one_device_loss(params, batch, rng=None, *, tied=False):
    h = embed(params["embed"], batch["tokens"])
    h = stage(params["layers"], h, batch["gain"], rng=rng)
    return head_loss({"table": params["embed"]} if tied else params["head"], h, batch)


def split_numbers(params):
    """Separates the integers, which cannot be differentiated."""
    layers = dict(params["layers"])
    return {**params, "layers": layers}, layers.pop("number")


def value_and_grads(loss, params, batch):
    weights, numbers = split_numbers(params)

    def of_weights(weights, batch):
        return loss({**weights, "layers": {**weights["layers"], "number": numbers}}, batch)

    return jax.jit(jax.value_and_grad(of_weights))(weights, batch)


def assert_close(got, expected, tolerance=1e-5):
    for (path, a), (_, b) in zip(jax.tree.leaves_with_path(got), jax.tree.leaves_with_path(expected), strict=True):
        scale = max(float(np.abs(b).max()), 1e-30)
        assert np.abs(np.asarray(a) - np.asarray(b)).max() / scale < tolerance, jax.tree_util.keystr(path)


@functools.cache
def one_device(rows, seed, *, tied=False):
    """Arguments and the expected loss and gradients, for all meshes and schedules."""
    params, batch = make_params(), make_batch(rows)
    rng = None if seed is None else row_key(jax.random.key(seed))
    return params, batch, value_and_grads(functools.partial(one_device_loss, rng=rng, tied=tied), params, batch)


def mesh_of(text):
    size = int(np.prod([int(part.split(":")[1]) for part in text.split(",")]))
    return mw.create_mesh(text, devices=size)
