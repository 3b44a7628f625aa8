"""Tensor-parallel linen modules with separate parameters on each device, for use inside `shard_map`.

Each device has its own layer, stacked along the axis, so the trees depend on the axis size and the kind of layer;
`global_params` converts them to one global layout and back.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core import FrozenDict
from flax.core.scope import LazyRng
from jax import lax

from meshwright.errors import PlacementError, did_you_mean
from meshwright.linen.rings import async_gather, async_gather_bidirectional, async_scatter, async_scatter_split
from meshwright.linen.stacking import masker, stack_params, unstack_params
from meshwright.mesh.axes import axis_index, axis_size, pcast_varying, summing_dtype
from meshwright.parallel.overlap.ring_loops import sum_scattered
from meshwright.rng import fold_rng_over_axis
from meshwright.specs import round_up
from meshwright.tree import named_tree_map
from meshwright.types import PyTree

TPMode = Literal["scatter", "gather", "none"]
Initializer = Callable[..., Any]


class ModelParallelismWrapper(nn.Module):
    """Gives every device along a mesh axis its own copy of a module, with separate parameters.

    All variables of the inner module, named `sharded`, get a new leading dim for the axis: size 1 on each device, the
    axis size globally.

    Attributes:
        module_fn: constructs the inner module; called with `name="sharded"` and `module_kwargs`.
        mask_except_model_idx: the only device with non-zero variables (default: all). On the other devices, variables
            are masked at creation and at use, so their gradients are zero too.
        split_rngs: give each device its own random keys, for parameters and all other streams such as dropout.

    Example:
        >>> import meshwright as mw
        >>> layer = ModelParallelismWrapper("tp", nn.Dense, module_kwargs=FrozenDict(features=4))
        >>> init = mw.parallel.local_map(layer.init, mesh=mw.create_mesh("tp:8"), in_specs=mw.P(), out_specs=mw.P("tp"))
        >>> kernel = jax.eval_shape(init, jax.random.key(0), jnp.ones((2, 3)))["params"]["sharded"]["kernel"]
        >>> kernel.names, kernel.value.shape
        (('tp', None, None), (8, 3, 4))
    """

    model_axis_name: str
    module_fn: Callable[..., nn.Module]
    mask_except_model_idx: int | None = None
    split_rngs: bool = True
    module_kwargs: FrozenDict[str, Any] = FrozenDict()

    @nn.compact
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        def run(module: ModelParallelismWrapper, *args: Any, **kwargs: Any) -> Any:
            if module.split_rngs:
                _fold_streams(module, module.model_axis_name)
            return module.module_fn(name="sharded", **module.module_kwargs)(*args, **kwargs)

        axis_size(self.model_axis_name, who=type(self).__name__)
        # Cast here, the gradients of the inputs are summed once, and a scan inside starts with the type of its result.
        args, kwargs = jax.tree.map(
            lambda leaf: pcast_varying(leaf, self.model_axis_name) if isinstance(leaf, jax.Array) else leaf,
            (args, kwargs),
        )
        mapped = nn.map_variables(
            run,
            trans_in_fn=lambda variables: self._enter(unstack_params(variables, self.model_axis_name)),
            trans_out_fn=lambda variables: stack_params(self._leave(variables), self.model_axis_name),
            mutable=True,
            # If parameters are changed after init, the output at init must use the changed ones.
            init=self.is_initializing() and self._changes_params(),
        )
        return mapped(self, *args, **kwargs)

    def _changes_params(self) -> bool:
        return self.mask_except_model_idx is not None

    def _enter(self, variables: PyTree) -> PyTree:
        """Transforms the inner module's variables before use."""
        mask = masker(self.model_axis_name, self.mask_except_model_idx, who=type(self).__name__)
        return {name: jax.tree.map(mask, tree) if name == "params" else tree for name, tree in variables.items()}

    def _leave(self, variables: PyTree) -> PyTree:
        """Transforms the inner module's variables after they are created or written."""
        return ModelParallelismWrapper._enter(self, variables)


class _PartialSumWrapper(ModelParallelismWrapper):
    """Wraps a layer whose outputs are summed over devices, so that its bias counts only once.

    Biases start at zero on all devices but the first, and only the first gets gradients. The layer still adds all
    biases, so that parameters trained with a bias on every device compute the same function.
    """

    def _changes_params(self) -> bool:
        return True

    def _enter(self, variables: PyTree) -> PyTree:
        first = axis_index(self.model_axis_name, who=type(self).__name__) == 0
        return _map_biases(lambda bias: jnp.where(first, bias, lax.stop_gradient(bias)), variables)

    def _leave(self, variables: PyTree) -> PyTree:
        mask = masker(self.model_axis_name, 0, who=type(self).__name__)
        return _map_biases(mask, variables) if self.is_initializing() else variables


class TPDense(nn.Module):
    """A dense layer split over the devices of a mesh axis, with one collective before or after it.

    Inputs and outputs are split on the last dim. `"gather"` all-gathers the inputs and computes some of the outputs on
    each device. `"scatter"` multiplies each device's inputs and reduce-scatters the outputs. `"none"`, or an axis of
    size 1, is a plain dense layer.

    Kernels are initialized as parts of the full kernel, so their scale does not depend on the number of devices. In
    `"scatter"`, only the first device has a bias, so that it counts once.

    Attributes:
        dense_fn: constructs one device's layer, with the features of one device (`"gather"`) or all features
            (`"scatter"`); must accept `kernel_init`, `use_bias` and `name`.
        skip_communication: skip the collective, if the inputs are already gathered or the partial sums are added later.
        kernel_init: initializer of the full kernel, of which each device keeps its part.
        kernel_init_adjustment: factor applied to the initial kernel.
        dense_name: the name of the inner layer; a plain layer with the default name gets flax's name.

    Example:
        >>> import meshwright as mw
        >>> layer = TPDense(functools.partial(nn.Dense, features=2), "tp", tp_mode="gather")
        >>> mesh, specs = mw.create_mesh("tp:8"), (mw.P(), mw.P(None, "tp"))
        >>> init = mw.parallel.local_map(layer.init, mesh=mesh, in_specs=specs, out_specs=mw.P("tp"))
        >>> params = jax.eval_shape(init, jax.random.key(0), jnp.ones((3, 8)))["params"]
        >>> params["module"]["sharded"]["kernel"].value.shape
        (8, 8, 2)
    """

    dense_fn: Any
    model_axis_name: str
    tp_mode: TPMode = "none"
    skip_communication: bool = False
    kernel_init: Initializer = nn.initializers.lecun_normal()
    kernel_init_adjustment: float = 1.0
    use_bias: bool = True
    dense_name: str = "module"

    @nn.compact
    def __call__(self, x: Any) -> Any:
        mode, axis = checked_mode(self), self.model_axis_name
        init = functools.partial(_part_of_whole, _adjusted_init(self), _shared_key(self))
        if mode == "none":
            named = {} if self.dense_name == "module" else {"name": self.dense_name}
            return self.dense_fn(kernel_init=init(), use_bias=self.use_bias, **named)(x)

        size, here = axis_size(axis, who="TPDense"), axis_index(axis, who="TPDense")
        if mode == "gather":
            if not self.skip_communication:
                # The gradient is a sum over devices in this dtype.
                wide = pcast_varying(x, axis).astype(summing_dtype(x.dtype))
                x = lax.all_gather(wide, axis, axis=x.ndim - 1, tiled=True).astype(x.dtype)
            wrapper, kernel_init = ModelParallelismWrapper, init(outputs=(here, size))
        else:
            wrapper, kernel_init = _PartialSumWrapper, init(inputs=(here, size))
        y = wrapper(
            axis,
            self.dense_fn,
            module_kwargs=FrozenDict(kernel_init=kernel_init, use_bias=self.use_bias),
            name=self.dense_name,
        )(x)
        return _scatter_sum(y, axis, size) if mode == "scatter" and not self.skip_communication else y


class TPAsyncDense(nn.Module):
    """A dense layer like `TPDense` with a ring instead of the collective, so that communication overlaps.

    Each device's layer is split into one piece per device: while one piece multiplies, the next shard is sent. The
    pieces are named `shard_0`, `shard_1`, ...; the first has the bias. On one device, or with `"none"`, there is only
    `shard_0`.

    Attributes:
        dense_fn: constructs a piece, with the output features of one device in either mode; see `TPDense`.
        dense_name: ignored; accepted for compatibility.
        use_bidirectional_gather: send shards both ways around the ring; the result is the same.
        use_bidirectional_scatter: send halves of the sums both ways around the ring; the result is the same.

    Example:
        >>> import meshwright as mw
        >>> layer = TPAsyncDense(functools.partial(nn.Dense, features=2), "tp", tp_mode="gather")
        >>> mesh, specs = mw.create_mesh("tp:8"), (mw.P(), mw.P(None, "tp"))
        >>> init = mw.parallel.local_map(layer.init, mesh=mesh, in_specs=specs, out_specs=mw.P("tp"))
        >>> params = jax.eval_shape(init, jax.random.key(0), jnp.ones((3, 8)))["params"]
        >>> len(params), params["shard_7"]["sharded"]["kernel"].value.shape
        (8, (8, 1, 2))
    """

    dense_fn: Any
    model_axis_name: str
    tp_mode: TPMode = "none"
    kernel_init: Initializer = nn.initializers.lecun_normal()
    kernel_init_adjustment: float = 1.0
    use_bias: bool = True
    dense_name: str = "module"
    use_bidirectional_gather: bool = True
    use_bidirectional_scatter: bool = False

    @nn.compact
    def __call__(self, x: Any) -> Any:
        mode, axis = checked_mode(self), self.model_axis_name
        init = functools.partial(_part_of_whole, _adjusted_init(self), _shared_key(self))
        if mode == "none":
            return self.dense_fn(kernel_init=init(), use_bias=self.use_bias, name="shard_0")(x)

        size, here = axis_size(axis, who="TPAsyncDense"), axis_index(axis, who="TPAsyncDense")

        def piece(k: int, x: Any, inputs: Any, outputs: Any) -> Any:
            kernel_init = init(inputs=(inputs % size, size), outputs=(outputs % size, size))
            return ModelParallelismWrapper(
                axis,
                self.dense_fn,
                module_kwargs=FrozenDict(kernel_init=kernel_init, use_bias=self.use_bias and k == 0),
                name=f"shard_{k}",
            )(x)

        if mode == "gather":
            ring = async_gather_bidirectional if self.use_bidirectional_gather else async_gather
            # Entry k is the shard of the device k positions below this one.
            parts = [piece(k, shard, here - k, here) for k, shard in enumerate(ring(x, axis))]
            return functools.reduce(jnp.add, parts)
        # Entry k goes to the device n - 1 - k hops away.
        parts = [piece(k, x, here, here + size - 1 - k) for k in range(size)]
        scatter = async_scatter_split if self.use_bidirectional_scatter else async_scatter
        return scatter(parts, axis)


def scale_init(init_fn: Initializer, scale_factor: float = 1.0) -> Initializer:
    """Returns an initializer that multiplies the values of `init_fn` by a factor.

    Example:
        >>> scale_init(nn.initializers.ones, 0.5)(jax.random.key(0), (2,)).tolist()
        [0.5, 0.5]
    """

    def scaled(*args: Any, **kwargs: Any) -> Any:
        return jax.tree.map(lambda x: (x * scale_factor).astype(x.dtype), init_fn(*args, **kwargs))

    return scaled


def checked_mode(layer: TPDense | TPAsyncDense) -> TPMode:
    """Returns a layer's `tp_mode`, or `"none"` on an axis of size 1."""
    known = ("scatter", "gather", "none")
    if layer.tp_mode not in known:
        raise PlacementError(
            f"{type(layer).__name__}: tp_mode={layer.tp_mode!r} is unknown.",
            hint=did_you_mean(str(layer.tp_mode), known) or f"use one of: {', '.join(known)}.",
        )
    return layer.tp_mode if axis_size(layer.model_axis_name, who=type(layer).__name__) > 1 else "none"


def _adjusted_init(layer: TPDense | TPAsyncDense) -> Initializer:
    return scale_init(layer.kernel_init, layer.kernel_init_adjustment)


def _shared_key(layer: nn.Module) -> Any:
    """Returns a key that all devices and pieces share, so that they are parts of the same kernel."""
    return layer.make_rng("params") if layer.is_initializing() and layer.has_rng("params") else None


def _part_of_whole(
    init_fn: Initializer, shared_key: Any, *, inputs: tuple[Any, int] = (0, 1), outputs: tuple[Any, int] = (0, 1)
) -> Initializer:
    """Returns an initializer that initializes the full kernel and returns part `inputs[0]` of `inputs[1]` of its rows.

    `outputs` selects columns in the same way. `init_fn` sees the sizes of a single-device layer. On TPUs and GPUs, XLA
    computes only the part; on CPUs it computes the full kernel first, which briefly takes four times its memory.
    """
    calls = itertools.count()  # so that two kernels of a layer differ

    def draw(key: Any, shape: tuple[int, ...], *args: Any, **kwargs: Any) -> Any:
        key = key if shared_key is None else jax.random.fold_in(shared_key, next(calls))
        if len(shape) < 2:
            return init_fn(key, shape, *args, **kwargs)
        *rest, rows, columns = shape
        whole = init_fn(key, (*rest, rows * inputs[1], columns * outputs[1]), *args, **kwargs)

        def cut(x: Any) -> Any:
            for (index, count), dim, size in ((inputs, -2, rows), (outputs, -1, columns)):
                x = lax.dynamic_slice_in_dim(x, index * size, size, axis=x.ndim + dim) if count > 1 else x
            return x

        return jax.tree.map(cut, whole)

    return draw


def _scatter_sum(y: Any, axis: str, size: int) -> Any:
    if y.shape[-1] % size:
        raise PlacementError(
            f"TPDense in mode 'scatter' cannot split {y.shape[-1]} outputs over the {size} devices of axis {axis!r}: "
            f"{y.shape[-1]} % {size} = {y.shape[-1] % size}.",
            hint=f"return a layer of {round_up(y.shape[-1], size)} features from dense_fn (the total, not per device).",
        )
    return sum_scattered(y, axis, dim=-1)


def _map_biases(change: Callable[[Any], Any], variables: PyTree) -> PyTree:
    def visit(name: tuple[str, ...], leaf: Any) -> Any:
        return change(leaf) if name[0] == "params" and "bias" in name else leaf

    return named_tree_map(visit, variables)


def _fold_streams(module: nn.Module, axis: str) -> None:
    """Makes a module's random keys differ along an axis; its lifted scope is created for this call only."""
    assert module.scope is not None
    for stream, key in module.scope.rngs.items():
        module.scope.rngs[stream] = LazyRng.create(fold_rng_over_axis(key.as_jax_rng(), axis))
