"""Trains two tensor-parallel transformer layers, written in two ways, to the same loss on eight devices and on one.

    python examples/tensor_parallel_block.py

1. The task: two layers of causal attention and a gated MLP, on synthetic sequences.
2. Meshwright's functions on global arrays, with activations split by rows of the sequence.
3. The linen layers `TPDense`, `TPAsyncDense` and `ModelParallelismWrapper` with per-device parameters, and activations
   split by features.
4. Training of both, on dp:2,tp:4 and on one device, from the same global parameters.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import lax

import meshwright as mw
from meshwright import P
from meshwright.linen import DenseForm, ModelParallelismWrapper, TPAsyncDense, TPDense, from_global, to_global
from meshwright.parallel import axis_size, fused_column_dense, local_heads, local_map, row_dense, sequence_norm

DIM, HEADS, MLP, LAYERS, SEQ, BATCH, STEPS, RATE = 32, 4, 64, 2, 16, 8, 20, 0.5


# --- 1. Parameters, data and functions that both versions share ---


def init(key):
    """Returns the global parameters, from which every run starts."""

    def dense(key, rows, columns):
        return {"kernel": jax.random.normal(key, (rows, columns)) / np.sqrt(rows)}

    def layer(key):
        keys = dict(zip(("q", "k", "v", "out", "gate", "up", "down"), jax.random.split(key, 7), strict=True))
        return {
            "attention_norm": {"scale": jnp.ones(DIM)},
            **{name: dense(keys[name], DIM, DIM) for name in ("q", "k", "v")},
            "out": dense(keys["out"], DIM, DIM) | {"bias": jnp.zeros(DIM)},
            "mlp_norm": {"scale": jnp.ones(DIM)},
            **{name: dense(keys[name], DIM, MLP) for name in ("gate", "up")},
            "down": dense(keys["down"], MLP, DIM) | {"bias": jnp.zeros(DIM)},
        }

    return {f"layer_{index}": layer(key) for index, key in enumerate(jax.random.split(key, LAYERS))}


def data(key):
    """Returns sequences, and their running means as targets."""
    x = jax.random.normal(key, (BATCH, SEQ, DIM))
    return x, jnp.cumsum(x, axis=1) / jnp.arange(1, SEQ + 1)[:, None]


def attention(q, k, v, num_heads):
    """Causal attention over this device's heads."""
    q, k, v = (y.reshape(*y.shape[:2], num_heads, DIM // HEADS) for y in (q, k, v))
    return jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(*q.shape[:2], -1)


def squared_error(y, target, axes):
    """Mean over the global batch: each device's share, summed over `axes`."""
    part = jnp.sum((y - target) ** 2) / (BATCH * SEQ * DIM)
    return lax.psum(part, axes) if axes else part


# --- 2. With Meshwright's functions ---

COLUMN, ROW = P(None, "tp"), P("tp", None)
LAYER_SPECS = {
    "attention_norm": {"scale": P()},
    **{name: {"kernel": COLUMN} for name in ("q", "k", "v", "gate", "up")},
    **{name: {"kernel": ROW, "bias": P()} for name in ("out", "down")},
    "mlp_norm": {"scale": P()},
}
PLAIN_SPECS = {f"layer_{index}": LAYER_SPECS for index in range(LAYERS)}
PLAIN_ROWS = P("dp", "tp")  # batch over dp, rows of the sequence over tp


def plain_model(params, x):
    """Runs unchanged in the local view, in a jit program under a mesh, and on one device."""
    for p in params.values():
        h = sequence_norm(x, p["attention_norm"]["scale"], axis="tp")
        q, k, v = fused_column_dense(h, [p[name]["kernel"] for name in ("q", "k", "v")], axis="tp")
        h = attention(q, k, v, local_heads(HEADS, axis="tp"))
        x = x + row_dense(h, p["out"]["kernel"], p["out"]["bias"], axis="tp")

        h = sequence_norm(x, p["mlp_norm"]["scale"], axis="tp")
        gate, up = fused_column_dense(h, [p[name]["kernel"] for name in ("gate", "up")], axis="tp")
        x = x + row_dense(jax.nn.silu(gate) * up, p["down"]["kernel"], p["down"]["bias"], axis="tp")
    return x


# --- 3. With the linen layers ---


class SplitNorm(nn.Module):
    """RMSNorm with features split over tp: each device scales its own, and the mean is over all features."""

    @nn.compact
    def __call__(self, x):
        mean = jnp.square(x).mean(-1, keepdims=True)
        if axis_size("tp", who="SplitNorm") > 1:
            mean = lax.pmean(mean, "tp")
        return x * lax.rsqrt(mean + 1e-6) * self.param("scale", nn.initializers.ones, x.shape[-1:])


class LinenLayer(nn.Module):
    """The same layer, with the number of features per device."""

    @nn.compact
    def __call__(self, x):
        ways = axis_size("tp", who="LinenLayer")

        def dense(kind, mode, features, name, **options):
            return kind(functools.partial(nn.Dense, features=features), "tp", tp_mode=mode, name=name, **options)

        h = ModelParallelismWrapper("tp", SplitNorm, name="attention_norm")(x)
        q, k, v = (dense(TPDense, "gather", DIM // ways, name, use_bias=False)(h) for name in ("q", "k", "v"))
        h = attention(q, k, v, HEADS // ways)
        x = x + dense(TPDense, "scatter", DIM, "out")(h)

        h = ModelParallelismWrapper("tp", SplitNorm, name="mlp_norm")(x)
        gate, up = (dense(TPAsyncDense, "gather", MLP // ways, name, use_bias=False)(h) for name in ("gate", "up"))
        return x + dense(TPAsyncDense, "scatter", DIM // ways, "down")(jax.nn.silu(gate) * up)


class LinenModel(nn.Module):
    @nn.compact
    def __call__(self, x):
        for index in range(LAYERS):
            x = LinenLayer(name=f"layer_{index}")(x)
        return x


LINEN_FEATURES = P("dp", None, "tp")  # batch over dp, features over tp


def linen_forms(ways):
    """Returns the form in which each dense layer stores its parameters on `ways` devices."""
    kinds = {
        **dict.fromkeys(("q", "k", "v"), DenseForm(tp_mode="gather", axis_size=ways, axis_name="tp")),
        "out": DenseForm(tp_mode="scatter", axis_size=ways, axis_name="tp"),
        **dict.fromkeys(("gate", "up"), DenseForm(tp_mode="gather", axis_size=ways, pieces=True, axis_name="tp")),
        "down": DenseForm(tp_mode="scatter", axis_size=ways, pieces=True, axis_name="tp"),
    }
    return {f"layer_{index}/{name}": form for index in range(LAYERS) for name, form in kinds.items()}


def linen_params(params, ways):
    """Converts global parameters to those of `LinenModel`."""

    def stacked(layer):
        scales = {
            name: {"sharded": {"scale": nn.Partitioned(layer[name]["scale"].reshape(ways, -1), ("tp", None))}}
            for name in ("attention_norm", "mlp_norm")
        }
        return layer | scales

    return from_global({name: stacked(layer) for name, layer in params.items()}, linen_forms(ways))


def global_params(params, ways):
    """Converts parameters of `LinenModel` to global ones."""

    def joined(layer):
        norms = ("attention_norm", "mlp_norm")
        return layer | {name: {"scale": layer[name]["sharded"]["scale"].value.reshape(-1)} for name in norms}

    return {name: joined(layer) for name, layer in to_global(params, linen_forms(ways)).items()}


# --- 4. Training ---


def train(model, params, specs, activations, mesh):
    """Runs gradient descent and returns all losses and the final parameters."""
    axes = tuple(axis for axis, size in mesh.shape.items() if size > 1)

    def loss(params, x, target):
        return squared_error(model(params, x), target, axes)

    placed = local_map(loss, mesh=mesh, in_specs=(specs, activations, activations), out_specs=P())

    @jax.jit
    def step(params, x, target):
        value, grads = jax.value_and_grad(placed)(params, x, target)
        return value, jax.tree.map(lambda p, g: p - RATE * g, params, grads)

    batch, losses = data(jax.random.key(1)), []
    for _ in range(STEPS):
        value, params = step(params, *batch)
        losses.append(float(value))
    return np.array(losses), jax.device_get(params)


def main():
    mw.simulate_cpu_devices()
    params = init(jax.random.key(0))
    losses, finals = {}, {}
    for mesh in (mw.create_mesh("dp:1,tp:1", devices=1), mw.create_mesh("dp:2,tp:4")):
        where, ways = f"{mesh.size} device{'s' if mesh.size > 1 else ''}", mesh.shape["tp"]
        losses["plain", where], finals["plain", where] = train(plain_model, params, PLAIN_SPECS, PLAIN_ROWS, mesh)

        start = linen_params(params, ways)
        apply = lambda params, x: LinenModel().apply({"params": params}, x)  # noqa: E731
        results = train(apply, start, nn.get_partition_spec(start), LINEN_FEATURES, mesh)
        losses["linen", where], finals["linen", where] = results[0], global_params(results[1], ways)

    print("step  " + "  ".join(f"{f'{kind}, {where}':>16}" for kind, where in losses))
    for index in (0, 1, 2, 5, 10, STEPS - 1):
        print(f"{index:4}  " + "  ".join(f"{values[index]:16.6f}" for values in losses.values()))

    reference = ("plain", "1 device")
    for case in losses:
        np.testing.assert_allclose(losses[case], losses[reference], rtol=1e-4, err_msg=str(case))
        jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-4), finals[case], finals[reference])
    assert losses[reference][-1] < 0.5 * losses[reference][0]
    print("all four runs agree in every loss and every final parameter")


if __name__ == "__main__":
    main()
