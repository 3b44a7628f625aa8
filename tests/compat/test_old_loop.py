"""A training loop in the style of code for xlstm_jax, on data, FSDP and tensor axes, compared with one device.

The first half uses only documented names of the older API, under their drop-in paths. The second half trains the same
model in float64 on one device, with plain arrays.
"""

import functools
import warnings
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax import lax
from jax.sharding import PartitionSpec as P

from meshwright.compat.xlstm_jax.common_types import Metrics, PRNGKeyArray, PyTree, TrainState
from meshwright.compat.xlstm_jax.distributed.array_utils import split_array_over_mesh
from meshwright.compat.xlstm_jax.distributed.data_parallel import shard_module_params, sync_gradients
from meshwright.compat.xlstm_jax.distributed.mesh_utils import initialize_mesh
from meshwright.compat.xlstm_jax.distributed.single_gpu import Batch, accumulate_gradients
from meshwright.compat.xlstm_jax.distributed.tensor_parallel import ModelParallelismWrapper, TPAsyncDense, TPDense
from meshwright.errors import MeshwrightWarning

WIDTH, HIDDEN, CLASSES = 8, 32, 16
ROWS, MINIBATCHES, STEPS, RATE = 32, 2, 3, 0.5
AXES = ("dp", "fsdp", "pp", "tp")


def parallel_config(data, fsdp, model):
    names = {"data_axis_name": "dp", "fsdp_axis_name": "fsdp", "pipeline_axis_name": "pp", "model_axis_name": "tp"}
    sizes = {"data_axis_size": data, "fsdp_axis_size": fsdp, "pipeline_axis_size": 1, "model_axis_size": model}
    return SimpleNamespace(**names, **sizes, fsdp_min_weight_size=WIDTH, tp_dense=TPDense)


# --- The model and the loop ---


class Block(nn.Module):
    """A gated MLP whose features are split over the tensor axis, at its inputs and its outputs."""

    config: SimpleNamespace

    @nn.compact
    def __call__(self, x):
        axis, ways = self.config.model_axis_name, self.config.model_axis_size
        dense = functools.partial(self.config.tp_dense, model_axis_name=axis)
        up, gate = (
            dense(functools.partial(nn.Dense, features=HIDDEN // ways), tp_mode="gather", name=name)(x)
            for name in ("up", "gate")
        )
        # One device's layer has all outputs in TPDense, and its own outputs in TPAsyncDense.
        features = WIDTH if self.config.tp_dense is TPDense else WIDTH // ways
        down = dense(functools.partial(nn.Dense, features=features), tp_mode="scatter", name="down")
        return x + down(nn.silu(gate) * up)


class Classifier(nn.Module):
    config: SimpleNamespace

    @nn.compact
    def __call__(self, x):
        axis, ways = self.config.model_axis_name, self.config.model_axis_size
        shard = functools.partial(
            shard_module_params, axis_name=self.config.fsdp_axis_name, min_weight_size=self.config.fsdp_min_weight_size
        )
        # Each device has its own features of the embedding and its own classes of the head.
        embed = functools.partial(shard(nn.Dense), features=WIDTH // ways)
        h = ModelParallelismWrapper(axis, embed, name="embed")(x)
        h = shard(Block)(self.config, name="block")(h)
        h = lax.all_gather(h, axis, axis=1, tiled=True)
        head = functools.partial(shard(nn.Dense), features=CLASSES // ways)
        logits = ModelParallelismWrapper(axis, head, name="head")(h)
        logits = lax.all_gather(logits, axis, axis=1, tiled=True)
        # The loss of each row is computed on one device.
        return split_array_over_mesh(logits, axis_name=axis, split_axis=0)


def loss_fn(params: PyTree, apply_fn, batch: Batch, rng: PRNGKeyArray) -> tuple[jax.Array, tuple[Metrics, PyTree]]:
    logits = apply_fn({"params": params}, batch.inputs)
    targets = split_array_over_mesh(batch.targets, axis_name="tp", split_axis=0)
    valid = targets >= 0
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(targets, 0)) * valid
    correct = (logits.argmax(-1) == targets) & valid
    count = valid.sum()
    metrics = {
        "loss": {"value": losses.sum(), "count": count, "log_modes": ["mean", "std"]},
        "accuracy": {"value": correct.sum(), "count": count, "log_modes": ["mean"]},
    }
    # The gradient of a tensor-parallel layer is a sum over the devices of its axis.
    return losses.sum() / count / lax.axis_size("tp"), (metrics, None)


def train(config, mesh, batches, *, use_scan, check):
    """Returns the initial state, the first gradients, the last state, and the metrics of each step."""
    model, optimizer = Classifier(config), optax.sgd(RATE)

    def init(rng, x):
        params_rng, rng = jax.random.split(rng)
        params = model.init(params_rng, x)["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer, rng=rng)

    def step(state, batch):
        rng, step_rng = jax.random.split(state.rng)
        grads, metrics, _ = accumulate_gradients(state, batch, step_rng, MINIBATCHES, loss_fn, use_scan=use_scan)
        grads = sync_gradients(grads, AXES)
        modes = {name: metric.pop("log_modes") for name, metric in metrics.items()}
        assert modes == {"loss": ["mean", "std"], "accuracy": ["mean"]}
        metrics = jax.tree.map(lambda leaf: lax.psum(leaf, ("dp", "fsdp", "tp")), metrics)
        return state.apply_gradients(grads=grads, rng=rng), metrics, grads

    place = functools.partial(jax.shard_map, mesh=mesh)
    row = batches[0].inputs[:1]  # one row, which the tensor axis cannot split
    # Unchecked, because the specs are not known before; only shapes are computed.
    shapes = jax.eval_shape(place(init, in_specs=(P(), P()), out_specs=P(), check_vma=False), jax.random.key(0), row)
    specs = nn.get_partition_spec(shapes)
    state = first = jax.jit(place(init, in_specs=(P(), P()), out_specs=specs, check_vma=check))(jax.random.key(0), row)
    step = jax.jit(
        place(step, in_specs=(specs, P(("dp", "fsdp"))), out_specs=(specs, P(), specs.params), check_vma=check)
    )
    history, grads = [], []
    for batch in batches:
        state, metrics, grad = step(state, batch)
        history.append(jax.device_get(metrics))
        grads.append(grad)
    return first, grads[0], state, history


# --- The same on one device ---


def whole(tree, config):
    """Returns a tree of parameters or gradients as plain arrays, with the parts of all tensor devices side by side."""
    tree = jax.device_get(nn.meta.unbox(tree))
    stacked = {"embed": tree["embed"]["sharded"], "head": tree["head"]["sharded"]}
    layers = {
        name: {"kernel": np.concatenate(layer["kernel"], -1), "bias": layer["bias"].reshape(-1)}
        for name, layer in stacked.items()
    }
    for name in ("up", "gate", "down"):
        layers[name] = _joined(tree["block"][name], name, config)
    return layers


def _joined(layer, name, config):
    ways = config.model_axis_size
    if ways == 1:
        (plain,) = layer.values()  # one layer, named by flax or `shard_0`
        return dict(plain)
    if config.tp_dense is TPDense:
        kernel, bias = (layer["module"]["sharded"][part] for part in ("kernel", "bias"))
        # In mode "scatter" only the first device has a bias.
        return {
            "kernel": np.concatenate(kernel, -1 if name != "down" else 0),
            "bias": bias.reshape(-1) if name != "down" else bias[0],
        }
    pieces = [layer[f"shard_{k}"]["sharded"]["kernel"] for k in range(ways)]
    bias = layer["shard_0"]["sharded"]["bias"]
    # In mode "gather", piece k of device i multiplies the inputs of device i - k; in mode "scatter" it makes the
    # outputs of device i + n - 1 - k, and the bias of piece 0 belongs to these outputs.
    if name == "down":
        columns = [np.concatenate([pieces[(i + ways - 1 - j) % ways][i] for i in range(ways)]) for j in range(ways)]
        return {"kernel": np.concatenate(columns, -1), "bias": np.roll(bias, -1, axis=0).reshape(-1)}
    columns = [np.concatenate([pieces[(i - j) % ways][i] for j in range(ways)]) for i in range(ways)]
    return {"kernel": np.concatenate(columns, -1), "bias": bias.reshape(-1)}


def reference(params, batches):
    """Returns the first gradients, the last parameters and the loss of each step, in float64."""
    with jax.enable_x64():
        params = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf, np.float64)), params)

        def dense(layer, x):
            return x @ layer["kernel"] + layer["bias"]

        def loss(params, x, targets):
            h = dense(params["embed"], x)
            h = h + dense(params["down"], nn.silu(dense(params["gate"], h)) * dense(params["up"], h))
            logits, valid = dense(params["head"], h), targets >= 0
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(targets, 0)) * valid
            return losses.sum() / valid.sum()

        first, values = None, []
        for batch in batches:
            x = jnp.asarray(np.asarray(batch.inputs, np.float64))
            value, grads = jax.jit(jax.value_and_grad(loss))(params, x, batch.targets)
            first = first or grads
            params = jax.tree.map(lambda p, g: p - RATE * g, params, grads)
            values.append(float(value))
        return jax.device_get((first, params)), values


def make_batches(data, fsdp, model):
    """Returns batches in which every device has 3 valid rows of 4, unevenly in its minibatches."""
    batches = []
    for index in range(STEPS):
        rng = np.random.default_rng(index)
        targets = rng.integers(0, CLASSES, (data * fsdp, MINIBATCHES, model, 2))
        for place in np.ndindex(data * fsdp, model):
            invalid = rng.integers(4)
            targets[place[0], invalid // 2, place[1], invalid % 2] = -1
        inputs = rng.normal(size=(ROWS, WIDTH)).astype(np.float32)
        batches.append(Batch(inputs=jnp.asarray(inputs), targets=jnp.asarray(targets.reshape(ROWS))))
    return batches


def assert_close(got, expected):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(expected), strict=True):
        # A float32 sum of at most 32 * 32 products is within 1024 * 2**-24 of its largest terms.
        np.testing.assert_allclose(a, b, rtol=0, atol=2**-14 * np.abs(b).max(), err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize(
    ("sizes", "tp_dense", "use_scan", "check"),
    [
        ((2, 2, 2), TPDense, False, False),
        ((2, 2, 2), TPDense, True, True),
        ((2, 2, 2), TPAsyncDense, False, True),
        ((1, 2, 4), TPAsyncDense, True, False),
        ((1, 2, 4), TPDense, False, True),
        ((8, 1, 1), TPDense, True, False),
        ((1, 8, 1), TPAsyncDense, False, True),
    ],
    ids=str,
)
def test_losses_gradients_and_parameters_equal_those_of_one_device(sizes, tp_dense, use_scan, check):
    config = parallel_config(*sizes)
    config.tp_dense = tp_dense
    mesh = initialize_mesh(config)
    assert dict(mesh.shape) == dict(zip(AXES, (*sizes[:2], 1, sizes[2]), strict=True))
    batches = make_batches(*sizes)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        first, grads, last, history = train(config, mesh, batches, use_scan=use_scan, check=check)
    empty = [str(warning.message) for warning in caught if issubclass(warning.category, MeshwrightWarning)]
    assert len(caught) == len(empty)
    assert bool(empty) == (sizes[2] > 1)  # the single row of init
    assert all("has size 1; axis 'tp'" in message for message in empty)

    kernel = first.params["embed"]["sharded"]["kernel"]
    assert kernel.names == (("tp", None, "fsdp") if sizes[2] == 1 else ("tp", "fsdp", None))  # its largest dim
    (expected_grads, expected_params), losses = reference(whole(first.params, config), batches)
    assert_close(whole(grads, config), expected_grads)
    assert_close(whole(last.params, config), expected_params)
    for metrics, loss in zip(history, losses, strict=True):
        assert int(metrics["loss"]["count"]) == int(metrics["accuracy"]["count"]) == 3 * 8
        assert metrics["accuracy"]["value"].dtype == metrics["accuracy"]["count"].dtype == np.int32
        np.testing.assert_allclose(metrics["loss"]["value"] / metrics["loss"]["count"], loss, rtol=2**-14)
    assert int(last.step) == STEPS
