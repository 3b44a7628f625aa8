"""Conversion between the parameters of tensor-parallel layers and the kernel and bias of a single-device layer.

`TPDense` and `TPAsyncDense` store one layer per device, so their trees depend on the axis size and the kind of layer.
The global layout is always `{"kernel": [inputs, outputs], "bias": [outputs]}`. Use it to move parameters to another
axis size, to the other kind of layer, or to other libraries.

Legend: n devices; device i; piece k; I, O the input and output features of one piece. Leading dims, such as the layers
of `nn.scan`, are kept.
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
    """The storage of a tensor-parallel dense layer's parameters; `DenseForm.of(layer, axis_size=4)` gets it.

    Attributes:
        tp_mode: the layer's `tp_mode`. With `"none"`, or an axis size of 1, the layer is a plain one.
        pieces: whether the layer is a `TPAsyncDense`, which stores one kernel per pair of devices.
        name: the name of the inner layer; for a plain layer, the default `module` stands for flax's `Dense_0`.
        original_split_scatter: set this for parameters that xlstm_jax trained with `use_bidirectional_scatter=True`,
            which sends the right half of each output to another device than Meshwright does.
        axis_name: if set, `from_global` returns arrays in boxes that name this axis, as the layers expect.
    """

    tp_mode: TPMode
    axis_size: int
    pieces: bool = False
    name: str = "module"
    original_split_scatter: bool = False
    axis_name: str | None = None

    @classmethod
    def of(cls, layer: TPDense | TPAsyncDense, *, axis_size: int, boxed: bool = True) -> DenseForm:
        """Returns the form of a layer on an axis of this size; `boxed` sets `axis_name`."""
        return cls(
            tp_mode=layer.tp_mode,
            axis_size=axis_size,
            pieces=isinstance(layer, TPAsyncDense),
            name=layer.dense_name,
            axis_name=layer.model_axis_name if boxed else None,
        )

    @property
    def is_plain(self) -> bool:
        """Whether the layer stores full arrays."""
        return self.tp_mode == "none" or self.axis_size == 1

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the layer's children."""
        if self.pieces:
            return tuple(f"shard_{k}" for k in range(1 if self.is_plain else self.axis_size))
        return ("Dense_0" if self.is_plain and self.name == "module" else self.name,)


def to_global(params: Tree, form: DenseForm | Mapping[str, DenseForm]) -> dict[str, Any]:
    """Converts a layer's parameters to one `kernel` and one `bias`.

    In mode `"scatter"`, the biases of all devices are summed, because the layer adds them up.

    Args:
        params: the layer's parameters as global arrays, in boxes or not; or those of a whole model.
        form: the layer's form; for a whole model, a form by path for each tensor-parallel layer. Other parameters are
            returned unchanged.

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
    """Converts one `kernel` and one `bias` to the parameters of a tensor-parallel layer, as the inverse of `to_global`.

    Args:
        params: the layer's `kernel` and `bias`; or the parameters of a whole model.
        form: the layer's form; for a whole model, a form by path for each tensor-parallel layer.

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
    """Returns the row and column in the full kernel of each block (piece k, device i), for each half of the outputs.

    There is only one entry unless the two halves are in different columns.
    """
    k, i = np.indices((form.axis_size, form.axis_size))
    if form.tp_mode == "gather":  # the shard from k devices down the ring, for this device's outputs
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
    """Reorders the blocks along a dim; with two orders, one for each half of the last dim."""
    xp, cut = _namespace(x), ceil_div(x.shape[-1], len(orders))
    halves = [x[..., :cut], x[..., cut:]][: len(orders)]
    moved = [xp.take(half, direction(order), axis=dim) for half, order in zip(halves, orders, strict=True)]
    return xp.concatenate(moved, axis=-1)


def _merge(x: Any, dim: int) -> Any:
    """Merges a dim, counted from the end, with the next one."""
    at = x.ndim + dim
    return x.reshape(*x.shape[:at], -1, *x.shape[at + 2 :])


def _divide(x: Any, dim: int, ways: int) -> Any:
    """Splits a dim, counted from the end, into `ways` blocks along a new dim before it."""
    at = x.ndim + dim
    return x.reshape(*x.shape[:at], ways, x.shape[at] // ways, *x.shape[at + 1 :])


def _namespace(x: Any) -> Any:
    return np if isinstance(x, np.ndarray) else jnp  # numpy arrays stay on the host and keep their dtype


def _boxed(layer: dict[str, Any], form: DenseForm) -> dict[str, Any]:
    if form.axis_name is None:
        return layer
    dims_after = {"kernel": 2, "bias": 1}

    def box(name: str, x: Any) -> nn.Partitioned[Any]:
        after = dims_after[name]
        return nn.Partitioned(x, (*(None,) * (x.ndim - after - 1), form.axis_name, *(None,) * after))

    return {name: box(name, x) for name, x in layer.items()}


def _read(params: Tree, form: DenseForm) -> list[dict[str, Any]]:
    """Returns the unboxed arrays of each inner layer, and checks them."""
    if set(params) != set(form.names) and not (form.is_plain and not form.pieces and len(params) == 1):
        raise TreeError(
            f"expected a layer with {', '.join(form.names)}; got {', '.join(params) or 'an empty one'}.",
            hint=f"check that the form matches the layer and its axis size: {form}.",
        )
    layers = []
    for name in form.names if len(params) > 1 else params:
        layer = params[name]
        if not form.is_plain:
            if "sharded" not in layer:
                raise TreeError(
                    f"expected `sharded` in `{name}` of a layer on {form.axis_size} devices; got {', '.join(layer)}.",
                    hint="use axis_size=1 for the parameters of a plain layer.",
                )
            layer = layer["sharded"]
        layers.append(_checked_layer(layer, form, where=f"`{name}`", stacked=not form.is_plain))
    return layers


def _checked_layer(layer: Tree, form: DenseForm, *, where: str, stacked: bool = False) -> dict[str, Any]:
    if "kernel" not in layer or not set(layer) <= {"kernel", "bias"}:
        raise TreeError(f"{where} has {', '.join(layer)}; a dense layer has a kernel and optionally a bias.")
    arrays = {name: open_box(leaf)[0] for name, leaf in layer.items()}
    if stacked:
        for name, dim in (("kernel", -3), ("bias", -2)):
            shape = arrays[name].shape if name in arrays else None
            if shape is not None and (len(shape) < -dim or shape[dim] != form.axis_size):
                raise TreeError(
                    f"{where}: {name} has shape {shape}; on {form.axis_size} devices, dim {dim} must have that size.",
                    hint="convert outside of shard_map, with the axis size that the parameters were created for.",
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
                    hint=f"use an axis size that divides {size}.",
                )
    return arrays


def _at_paths(params: Tree, forms: Mapping[str, DenseForm], convert: Callable[..., Any]) -> dict[str, Any]:
    whole = dict(params)
    for path, form in forms.items():
        first, _, rest = path.partition("/")
        if first not in whole:
            raise TreeError(
                f"no {first!r} found on the path `{path}`; the parameters have: {', '.join(whole)}.",
                hint=did_you_mean(first, whole) or "use the paths of the parameters, joined by `/`.",
            )
        whole[first] = convert(whole[first], {rest: form} if rest else form)
    return whole
