"""A vision transformer in plain JAX that learns to name generated shapes. Nothing in it mentions a mesh.

meshwright train --job examples/vit_shapes.py:job --mesh dp:2,fsdp:2,tp:2 --steps 200
meshwright verify examples/vit_shapes.py:job --mesh dp:8 fsdp:8
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import meshwright as mw
from meshwright import P

SIZE, PATCH, DIM, HEADS, LAYERS, ROWS = 16, 4, 32, 4, 2, 64
NAMES = ("square", "disk", "cross", "ring")


# --- Data: images of one shape each, with a random place, size and noise ---


def make_images(num_rows, seed):
    rng = np.random.default_rng(seed)
    label = rng.integers(0, len(NAMES), num_rows).astype(np.int32)
    center, radius = rng.uniform(5, SIZE - 5, (2, num_rows, 1, 1)), rng.uniform(3, 5, (num_rows, 1, 1))
    y, x = np.mgrid[:SIZE, :SIZE]
    dy, dx = abs(y - center[0]), abs(x - center[1])
    distance = np.hypot(dy, dx)
    shapes = [
        (dy < radius) & (dx < radius),
        distance < radius,
        (np.minimum(dy, dx) < 1) & (np.maximum(dy, dx) < radius),
        abs(distance - radius) < 1,
    ]
    image = np.select([label[:, None, None] == index for index in range(len(NAMES))], shapes).astype(np.float32)
    return {"image": (image + rng.normal(0, 0.2, image.shape)).astype(np.float32), "label": label}


# --- Model ---


def dense_init(key, num_in, num_out):
    return {"kernel": jax.random.normal(key, (num_in, num_out)) * num_in**-0.5, "bias": jnp.zeros(num_out)}


def init(key):
    keys = iter(jax.random.split(key, 6 * LAYERS + 3))
    blocks = [
        {
            "attention": {name: dense_init(next(keys), DIM, DIM) for name in ("q", "k", "v", "out")},
            "mlp": {"up": dense_init(next(keys), DIM, 4 * DIM), "down": dense_init(next(keys), 4 * DIM, DIM)},
            "norm_1": {"scale": jnp.ones(DIM)},
            "norm_2": {"scale": jnp.ones(DIM)},
        }
        for _ in range(LAYERS)
    ]
    position = 0.02 * jax.random.normal(next(keys), ((SIZE // PATCH) ** 2, DIM))
    patch, head = dense_init(next(keys), PATCH**2, DIM), dense_init(next(keys), DIM, len(NAMES))
    return {"patch": patch, "position": position, "blocks": blocks, "norm": {"scale": jnp.ones(DIM)}, "head": head}


def dense(params, x):
    return x @ params["kernel"] + params["bias"]


def norm(params, x):
    x = x - x.mean(axis=-1, keepdims=True)
    return params["scale"] * x * jax.lax.rsqrt((x**2).mean(axis=-1, keepdims=True) + 1e-6)


def attention(params, x):
    q, k, v = (dense(params[name], x).reshape(*x.shape[:2], HEADS, -1) for name in ("q", "k", "v"))
    return dense(params["out"], jax.nn.dot_product_attention(q, k, v).reshape(x.shape))


def forward(params, image):
    side = SIZE // PATCH
    patches = image.reshape(-1, side, PATCH, side, PATCH).swapaxes(2, 3).reshape(-1, side**2, PATCH**2)
    x = dense(params["patch"], patches) + params["position"]
    for block in params["blocks"]:
        x = x + attention(block["attention"], norm(block["norm_1"], x))
        x = x + dense(block["mlp"]["down"], jax.nn.gelu(dense(block["mlp"]["up"], norm(block["norm_2"], x))))
    return dense(params["head"], norm(params["norm"], x.mean(axis=1)))


def loss(params, batch, rng):
    logits, label = forward(params, batch["image"]), batch["label"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, label)
    hits = (logits.argmax(axis=-1) == label).astype(jnp.float32)
    confusion = jnp.zeros((len(NAMES), len(NAMES)), jnp.int32).at[label, logits.argmax(axis=-1)].add(1)
    metrics = {"accuracy": mw.metrics.Mean(hits.mean()), "confusion": mw.metrics.Sum(confusion)}
    return (losses.sum(), jnp.float32(losses.size)), metrics


# --- Job ---

rules = mw.Rules(
    [
        ("(q|k|v|up)/kernel", P("fsdp", "tp")),
        ("(q|k|v|up)/bias", P("tp")),
        ("(out|down)/kernel", P("tp", "fsdp")),
        ("patch/kernel|position", P(None, "fsdp")),
        ("head/kernel", P("fsdp")),
        ("bias|scale", P()),
    ],
    optional_axes=("fsdp", "tp"),
)
job = mw.Job(
    init=init,
    rules=rules,
    loss=loss,
    batch=jax.tree.map(lambda array: array[:ROWS], make_images(ROWS, seed=0)),
    data=make_images(2048, seed=1),
    eval_data=make_images(256, seed=2),
    optimizer=lambda num_steps: optax.adamw(optax.cosine_decay_schedule(3e-3, num_steps)),
    predict=lambda params, batch: jax.nn.softmax(forward(params, batch["image"])),
)
