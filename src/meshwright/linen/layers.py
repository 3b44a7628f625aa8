"""Tensor-parallel linen modules whose parameters are this device's own: a wrapper for any module, and dense layers.

They are for use inside `shard_map`. Their trees depend on the axis size and on the kind of layer, because each device
has its own layer, stacked along the axis; `global_params` turns them into the one global layout and back.
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
    """Gives every device along a mesh axis its own copy of a module, with parameters of its own.

    The variables of the inner module, named `sharded`, get a new leading dim that stands for the axis: size 1 on each
    device, the axis size globally. All collections are treated so, since all may differ.

    Attributes:
        module_fn: makes the inner module; called with `name="sharded"` and `module_kwargs`.
        mask_except_model_idx: the one device whose variables are not zero. Those of the others are zero when they are
            made and when they are used, so that their gradients are zero too.
        split_rngs: gives each device random keys of its own, for parameters and for every other stream (dropout).

    Example:
        >>> import meshwright as mw
        >>> from jax.sharding import PartitionSpec as P
        >>> layer = ModelParallelismWrapper("tp", nn.Dense, module_kwargs=FrozenDict(features=4))
        >>> init = mw.parallel.local_map(layer.init, mesh=mw.create_mesh("tp:8"), in_specs=P(), out_specs=P("tp"))
        >>> variables = jax.eval_shape(init, jax.random.key(0), jnp.ones((2, 3)))
        >>> kernel = variables["params"]["sharded"]["kernel"]
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
        # Everything inside differs between devices. Said here, the gradients of the inputs are summed once, and a scan
        # inside starts with the type that its body returns.
        args, kwargs = jax.tree.map(
            # Flags and the like stay Python values.
            lambda leaf: pcast_varying(leaf, self.model_axis_name) if isinstance(leaf, jax.Array) else leaf,
            (args, kwargs),
        )
        mapped = nn.map_variables(
            run,
            trans_in_fn=lambda variables: self._enter(unstack_params(variables, self.model_axis_name)),
            trans_out_fn=lambda variables: stack_params(self._leave(variables), self.model_axis_name),
            mutable=True,
            # Where parameters change on the way out, the output at init must already be that of the changed ones.
            init=self.is_initializing() and self._changes_params(),
        )
        return mapped(self, *args, **kwargs)

    def _changes_params(self) -> bool:
        return self.mask_except_model_idx is not None

    def _enter(self, variables: PyTree) -> PyTree:
        """Changes the inner module's variables before they are used."""
        mask = masker(self.model_axis_name, self.mask_except_model_idx, who=type(self).__name__)
        return {name: jax.tree.map(mask, tree) if name == "params" else tree for name, tree in variables.items()}

    def _leave(self, variables: PyTree) -> PyTree:
        """Changes the inner module's variables after they were made or written."""
        return ModelParallelismWrapper._enter(self, variables)


class _PartialSumWrapper(ModelParallelismWrapper):
    """Wraps a layer whose outputs are added up over devices, so that its bias must be counted once.

    A bias starts as zero on every device but the first, and only the first one's gets a gradient. The function stays
    the sum of all biases: those trained when every device had one keep the function they were trained for.
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

    `"gather"` expects inputs split on the last dim, gathers them, and returns outputs split on the last dim.
    `"scatter"` expects the same, multiplies what each device has, and adds up and splits the outputs. `"none"`, and an
    axis of one device, is a plain dense layer.

    `dense_fn` makes the layer of one device: for `"gather"` with the features of one device, for `"scatter"` with all
    of them. Kernels are drawn as parts of the whole kernel, so their scale does not depend on the number of devices.
    In `"scatter"` the parameter named `bias` is that of the first device, so that it is counted once.

    Attributes:
        dense_fn: makes the layer; must take `kernel_init`, `use_bias` and `name`.
        model_axis_name: the mesh axis.
        skip_communication: leaves out the gather or the scatter: for inputs that are gathered already, or partial sums
            that are added up later.
        kernel_init: draws the whole kernel, of which each device keeps its part.
        kernel_init_adjustment: a factor on what `kernel_init` draws.
        dense_name: the name of the layer. A plain layer has it only if it is not the default, and flax's otherwise.

    Example:
        >>> import meshwright as mw
        >>> from jax.sharding import PartitionSpec as P
        >>> layer = TPDense(functools.partial(nn.Dense, features=2), "tp", tp_mode="gather")
        >>> init = mw.parallel.local_map(
        ...     layer.init, mesh=mw.create_mesh("tp:8"), in_specs=(P(), P(None, "tp")), out_specs=P("tp")
        ... )
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
                # Its gradient is a sum, in the dtype that travels here.
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
    """A dense layer split over the devices of a mesh axis into as many pieces again, so that communication overlaps.

    The functions of `TPDense`, with a ring in place of the collective: while one piece multiplies, the next shard
    travels. `dense_fn` makes one piece, with the output features of one device in either mode. The pieces are named
    `shard_0`, `shard_1`, ...; the first has the bias. With one device, or `"none"`, there is only `shard_0`.

    Attributes:
        dense_fn: makes a piece; must take `kernel_init`, `use_bias` and `name`.
        model_axis_name: the mesh axis.
        kernel_init: draws the whole kernel, of which each piece is a part.
        kernel_init_adjustment: a factor on what `kernel_init` draws.
        dense_name: has no effect; it is there for code that gives it.
        use_bidirectional_gather: sends shards both ways around the ring; the function stays the same.
        use_bidirectional_scatter: sends halves of the sums both ways around the ring; the function stays the same.

    Example:
        >>> import meshwright as mw
        >>> from jax.sharding import PartitionSpec as P
        >>> layer = TPAsyncDense(functools.partial(nn.Dense, features=2), "tp", tp_mode="gather")
        >>> init = mw.parallel.local_map(
        ...     layer.init, mesh=mw.create_mesh("tp:8"), in_specs=(P(), P(None, "tp")), out_specs=P("tp")
        ... )
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
            # Entry k is the shard of the device k places below this one.
            parts = [piece(k, shard, here - k, here) for k, shard in enumerate(ring(x, axis))]
            return functools.reduce(jnp.add, parts)
        # Entry k is destined to the device that its n - 1 - k hops lead to.
        parts = [piece(k, x, here, here + size - 1 - k) for k in range(size)]
        scatter = async_scatter_split if self.use_bidirectional_scatter else async_scatter
        return scatter(parts, axis)


def scale_init(init_fn: Initializer, scale_factor: float = 1.0) -> Initializer:
    """Returns an initializer that draws what `init_fn` draws, times a factor.

    Example:
        >>> scale_init(nn.initializers.ones, 0.5)(jax.random.key(0), (2,)).tolist()
        [0.5, 0.5]
    """

    def scaled(*args: Any, **kwargs: Any) -> Any:
        return jax.tree.map(lambda x: (x * scale_factor).astype(x.dtype), init_fn(*args, **kwargs))

    return scaled


def checked_mode(layer: TPDense | TPAsyncDense) -> TPMode:
    """Returns how a layer is split here: as asked, or not at all on an axis of one device."""
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
    """Returns a key that is the same on every device and for every piece, so that they cut from the same kernel."""
    return layer.make_rng("params") if layer.is_initializing() and layer.has_rng("params") else None


def _part_of_whole(
    init_fn: Initializer,
    shared_key: Any,
    *,
    inputs: tuple[Any, int] = (0, 1),
    outputs: tuple[Any, int] = (0, 1),
) -> Initializer:
    """Returns an initializer that draws the whole kernel and returns one part of it.

    So `init_fn` sees the sizes it would see on one device, whatever it makes of them. XLA draws only the
    part on TPUs and GPUs; on CPUs it draws the whole kernel first, which takes four times its memory for a moment.

    Args:
        inputs: which part of how many, along the input dim (the last but one).
        outputs: the same along the output dim (the last).
    """
    calls = itertools.count()  # a layer with two kernels must not draw the same one twice

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
            f"TPDense in mode 'scatter' splits its {y.shape[-1]} outputs over the {size} devices of axis {axis!r}: "
            f"{y.shape[-1]} % {size} = {y.shape[-1] % size}.",
            hint=f"let dense_fn make a layer of {round_up(y.shape[-1], size)} features: all of them, not one device's.",
        )
    return sum_scattered(y, axis, dim=-1)


def _map_biases(change: Callable[[Any], Any], variables: PyTree) -> PyTree:
    def visit(name: tuple[str, ...], leaf: Any) -> Any:
        return change(leaf) if name[0] == "params" and "bias" in name else leaf

    return named_tree_map(visit, variables)


def _fold_streams(module: nn.Module, axis: str) -> None:
    """Makes a module's random keys differ along an axis; the scope is the lifted one, made for this call alone."""
    assert module.scope is not None
    for stream, key in module.scope.rngs.items():
        module.scope.rngs[stream] = LazyRng.create(fold_rng_over_axis(key.as_jax_rng(), axis))
