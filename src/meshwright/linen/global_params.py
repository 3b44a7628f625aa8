"""Parameters of the tensor-parallel layers as the one kernel and bias that a single device would hold, and back.

`TPDense` and `TPAsyncDense` store one layer per device, so their trees change with the axis size and with the kind of
layer. The global layout does not: `{"kernel": [inputs, outputs], "bias": [outputs]}`. Through it, parameters move
between axis sizes, between the two kinds of layer, and to layers of anyone else.

Legend: n devices; device i; piece k; I, O the input and output features of one piece. Leading dims, such as the layers
of `nn.scan`, are carried along.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from meshwright.errors import TreeError, did_you_mean
from meshwright.linen.layers import TPAsyncDense, TPDense, TPMode
from meshwright.linen.stacking import open_box
from meshwright.specs import ceil_div

Tree = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class DenseForm:
    """How a tensor-parallel dense layer stores its parameters; `DenseForm.of(layer, axis_size=4)` reads it off one.

    Attributes:
        tp_mode: as in the layer. With `"none"`, or an axis size of 1, the layer is a plain one.
        pieces: whether it is a `TPAsyncDense`, which stores one kernel per pair of devices.
        name: the layer inside; for a plain one, the default `module` stands for flax's own `Dense_0`.
        original_split_scatter: set for parameters that the original library trained with
            `use_bidirectional_scatter=True`. There, the right half of every output went to another device than ours.
        axis_name: where given, arrays from `from_global` are in boxes that name this axis, as the layers want them.
    """

    tp_mode: TPMode
    axis_size: int
    pieces: bool = False
    name: str = "module"
    original_split_scatter: bool = False
    axis_name: str | None = None

    @classmethod
    def of(cls, layer: TPDense | TPAsyncDense, *, axis_size: int, boxed: bool = True) -> DenseForm:
        """Returns the form of a layer's parameters on an axis of this size."""
        return cls(
            tp_mode=layer.tp_mode,
            axis_size=axis_size,
            pieces=isinstance(layer, TPAsyncDense),
            name=layer.dense_name,
            axis_name=layer.model_axis_name if boxed else None,
        )

    @property
    def is_plain(self) -> bool:
        """Whether the layer holds whole arrays."""
        return self.tp_mode == "none" or self.axis_size == 1

    @property
    def names(self) -> tuple[str, ...]:
        """The names directly below the layer."""
        if self.pieces:
            return tuple(f"shard_{k}" for k in range(1 if self.is_plain else self.axis_size))
        return ("Dense_0" if self.is_plain and self.name == "module" else self.name,)


def to_global(params: Tree, form: DenseForm | Mapping[str, DenseForm]) -> dict[str, Any]:
    """Returns a layer's parameters, which are global arrays in boxes or not, as whole `kernel` and `bias`.

    Biases that every device has in mode `"scatter"` become their sum, which is what the layer computes.

    Args:
        form: how the layer stores them; or, for the parameters of a whole model, a form for each path at which such a
            layer is. Everything else is returned as it is.

    Example:
        >>> params = {"module": {"sharded": {"kernel": jnp.ones((4, 8, 2)), "bias": jnp.ones((4, 2))}}}
        >>> whole = to_global(params, DenseForm(tp_mode="gather", axis_size=4))
        >>> whole["kernel"].shape, whole["bias"].shape
        ((8, 8), (8,))
    """
    if not isinstance(form, DenseForm):
        return _at_paths(params, form, to_global)
    layers = _read(params, form)
    whole = dict(layers[0])
    if form.is_plain:
        return whole
    bias = whole.pop("bias", None)
    if form.pieces:
        whole["kernel"] = _join_pieces([layer["kernel"] for layer in layers], form)
    elif form.tp_mode == "gather":
        whole["kernel"] = _merge(whole["kernel"].swapaxes(-3, -2), -2)
    else:
        whole["kernel"] = _merge(whole["kernel"], -3)
    if bias is None:
        return whole
    if form.pieces:
        whole["bias"] = _merge(_permute(bias, np.argsort, [columns[0] for _, columns in _places(form)], dim=-2), -2)
    elif form.tp_mode == "gather":
        whole["bias"] = _merge(bias, -2)
    else:
        wide = np.float32 if bias.dtype.itemsize < 4 else bias.dtype
        whole["bias"] = bias.sum(axis=-2, dtype=wide).astype(bias.dtype)
    return whole


def from_global(params: Tree, form: DenseForm | Mapping[str, DenseForm]) -> dict[str, Any]:
    """Returns whole `kernel` and `bias` as the parameters of a tensor-parallel layer: the inverse of `to_global`.

    Args:
        form: how the layer stores them; or a form for each path of a model's parameters that holds such a layer.

    Example:
        >>> whole = {"kernel": jnp.arange(64.0).reshape(8, 8), "bias": jnp.arange(8.0)}
        >>> on_two = from_global(whole, DenseForm(tp_mode="scatter", axis_size=2))
        >>> on_two["module"]["sharded"]["kernel"].shape
        (2, 4, 8)
        >>> in_pieces = from_global(whole, DenseForm(tp_mode="scatter", axis_size=4, pieces=True))
        >>> list(in_pieces), in_pieces["shard_3"]["sharded"]["kernel"].shape
        (['shard_0', 'shard_1', 'shard_2', 'shard_3'], (4, 2, 2))
    """
    if not isinstance(form, DenseForm):
        return _at_paths(params, form, from_global)
    whole = _checked_layer(params, form, where="the global layout")
    if form.is_plain:
        return {form.names[0]: whole}
    n, kernel, bias = form.axis_size, whole["kernel"], whole.get("bias")
    layers: list[dict[str, Any]]
    if form.pieces:
        layers = [{"kernel": piece} for piece in _cut_pieces(kernel, form)]
    elif form.tp_mode == "gather":
        layers = [{"kernel": _divide(kernel, -1, n).swapaxes(-3, -2)}]
    else:
        layers = [{"kernel": _divide(kernel, -2, n)}]
    if bias is not None:
        if form.pieces:
            columns = [columns[0] for _, columns in _places(form)]
            layers[0]["bias"] = _permute(_divide(bias, -1, n), np.asarray, columns, dim=-2)
        elif form.tp_mode == "gather":
            layers[0]["bias"] = _divide(bias, -1, n)
        else:
            none = _namespace(bias).zeros_like(bias)
            layers[0]["bias"] = _namespace(bias).stack([bias, *[none] * (n - 1)], axis=-2)
    return {name: {"sharded": _boxed(layer, form)} for name, layer in zip(form.names, layers, strict=True)}


def _places(form: DenseForm) -> list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    """Returns, for every piece k and device i, the row and the column of their block in the whole kernel.

    Twice, where the two halves of the outputs lie in different columns.
    """
    k, i = np.indices((form.axis_size, form.axis_size))
    if form.tp_mode == "gather":  # the shard that came k places up the ring, for this device's outputs
        return [((i - k) % form.axis_size, i)]
    hops = form.axis_size - 1 - k
    up, down = (i, (i + hops) % form.axis_size), (i, (i - hops) % form.axis_size)
    return [up, down] if form.original_split_scatter else [up]


def _join_pieces(pieces: list[Any], form: DenseForm) -> Any:
    n = form.axis_size
    blocks_kiIO = _namespace(pieces[0]).stack(pieces, axis=-4)
    order = [(rows * n + columns).ravel() for rows, columns in _places(form)]
    blocks_BIO = _permute(_merge(blocks_kiIO, -4), np.argsort, order, dim=-3)
    blocks_rIcO = blocks_BIO.reshape(*blocks_BIO.shape[:-3], n, n, *blocks_BIO.shape[-2:]).swapaxes(-3, -2)
    return _merge(_merge(blocks_rIcO, -2), -3)


def _cut_pieces(kernel: Any, form: DenseForm) -> list[Any]:
    n = form.axis_size
    blocks_rcIO = _divide(_divide(kernel, -1, n), -3, n).swapaxes(-3, -2)
    order = [(rows * n + columns).ravel() for rows, columns in _places(form)]
    blocks_BIO = _permute(_merge(blocks_rcIO, -4), np.asarray, order, dim=-3)
    blocks_kiIO = blocks_BIO.reshape(*blocks_BIO.shape[:-3], n, n, *blocks_BIO.shape[-2:])
    return [blocks_kiIO[..., k, :, :, :] for k in range(n)]


def _permute(x: Any, direction: Callable[[Any], Any], orders: list[Any], *, dim: int) -> Any:
    """Reorders the blocks along a dim; with two orders, the left and the right half of the last dim each in its own."""
    xp, cut = _namespace(x), ceil_div(x.shape[-1], len(orders))
    halves = [x[..., :cut], x[..., cut:]][: len(orders)]
    moved = [xp.take(half, direction(order), axis=dim) for half, order in zip(halves, orders, strict=True)]
    return xp.concatenate(moved, axis=-1)


def _merge(x: Any, dim: int) -> Any:
    """Joins a dim, counted from the end, with the one after it."""
    at = x.ndim + dim
    return x.reshape(*x.shape[:at], -1, *x.shape[at + 2 :])


def _divide(x: Any, dim: int, ways: int) -> Any:
    """Splits a dim, counted from the end, into `ways` blocks: a new dim before it."""
    at = x.ndim + dim
    return x.reshape(*x.shape[:at], ways, x.shape[at] // ways, *x.shape[at + 1 :])


def _namespace(x: Any) -> Any:
    return np if isinstance(x, np.ndarray) else jnp  # arrays on the host stay there, in their own dtype


def _boxed(layer: dict[str, Any], form: DenseForm) -> dict[str, Any]:
    if form.axis_name is None:
        return layer
    dims_after = {"kernel": 2, "bias": 1}

    def box(name: str, x: Any) -> nn.Partitioned[Any]:
        after = dims_after[name]
        return nn.Partitioned(x, (*(None,) * (x.ndim - after - 1), form.axis_name, *(None,) * after))

    return {name: box(name, x) for name, x in layer.items()}


def _read(params: Tree, form: DenseForm) -> list[dict[str, Any]]:
    """Returns the arrays of each layer inside, out of their boxes and checked."""
    if set(params) != set(form.names) and not (form.is_plain and not form.pieces and len(params) == 1):
        raise TreeError(
            f"a layer of this form holds {', '.join(form.names)}; this one holds {', '.join(params) or 'nothing'}.",
            hint=f"is it another layer, or trained on another axis size? The form is {form}.",
        )
    layers = []
    for name in form.names if len(params) > 1 else params:
        layer = params[name]
        if not form.is_plain:
            if "sharded" not in layer:
                raise TreeError(
                    f"`{name}` of a layer on {form.axis_size} devices holds `sharded`; this one holds "
                    f"{', '.join(layer)}.",
                    hint="parameters of a plain layer have axis_size=1.",
                )
            layer = layer["sharded"]
        layers.append(_checked_layer(layer, form, where=f"`{name}`", stacked=not form.is_plain))
    return layers


def _checked_layer(layer: Tree, form: DenseForm, *, where: str, stacked: bool = False) -> dict[str, Any]:
    if "kernel" not in layer or not set(layer) <= {"kernel", "bias"}:
        raise TreeError(f"{where} holds {', '.join(layer)}; a dense layer holds kernel and, maybe, bias.")
    arrays = {name: open_box(leaf)[0] for name, leaf in layer.items()}
    if stacked:
        for name, dim in (("kernel", -3), ("bias", -2)):
            shape = arrays[name].shape if name in arrays else None
            if shape is not None and (len(shape) < -dim or shape[dim] != form.axis_size):
                raise TreeError(
                    f"{where}: {name} has shape {shape}; on {form.axis_size} devices, its dim {dim} has that size.",
                    hint="convert global arrays: outside of shard_map, with the axis size they were made for.",
                )
        return arrays
    if not form.is_plain:
        for dim, what, is_split in (
            (-2, "inputs", form.pieces or form.tp_mode == "scatter"),
            (-1, "outputs", form.pieces or form.tp_mode == "gather"),
        ):
            size = arrays["kernel"].shape[dim]
            if is_split and size % form.axis_size:
                raise TreeError(
                    f"the kernel has {size} {what}, which {form.axis_size} devices do not divide: {size} % "
                    f"{form.axis_size} = {size % form.axis_size}.",
                    hint="use an axis size that divides it.",
                )
    return arrays


def _at_paths(params: Tree, forms: Mapping[str, DenseForm], convert: Callable[..., Any]) -> dict[str, Any]:
    whole = dict(params)
    for path, form in forms.items():
        first, _, rest = path.partition("/")
        if first not in whole:
            raise TreeError(
                f"there is no {first!r} on the way to a layer at `{path}`; here are: {', '.join(whole)}.",
                hint=did_you_mean(first, whole) or "write paths as in the parameters, joined by `/`.",
            )
        whole[first] = convert(whole[first], {rest: form} if rest else form)
    return whole
