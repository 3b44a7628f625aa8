"""Floating-point operations of a function, counted on its jaxpr for all devices together.

A scan counts as often as it loops, unlike in compilers' estimates. `Flops.notes` lists operations that cannot be
counted: custom kernels and loops of unknown length.

After differentiation, `jax.checkpoint` leaves its block in the backward pass. Operations of that block that do not
depend on an incoming gradient are recomputation (`Flops.recomputed`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from meshwright.hardware.linearity import (
    LINEAR_KERNELS,
    WITHOUT_INSIDE,
    inner_jaxprs,
    is_opaque,
    kernel_name,
    names,
    num_gradients,
    open_jaxpr,
    scan_marks,
    spread,
)


@dataclass(frozen=True)
class Flops:
    """FLOPs of all devices together; a multiply-add counts as two.

    Args:
        total: matmuls, convolutions, elementwise arithmetic and reductions.
        matmul: matmuls and convolutions, comparable with a chip's peak.
        recomputed: matmuls that `jax.checkpoint` repeats in the backward pass.
        by_dtype: matmuls by the dtype of their wider operand.
        attention: matmuls in attention kernels, which run slower than plain matmuls.
        moved: bytes of all operands and results of matmuls, each read or written once.
        masked: matmuls of plain causal attention whose results its mask drops; kernels skip them.
        notes: operations that were not counted, or not exactly.
    """

    total: int
    matmul: int
    recomputed: int = 0
    by_dtype: Mapping[str, int] = field(default_factory=dict)
    attention: int = 0
    moved: int = 0
    masked: int = 0
    notes: tuple[str, ...] = ()

    @property
    def model(self) -> int:
        """Matmul FLOPs that the model needs, without recomputation and masked products: the numerator of MFU."""
        return self.matmul - self.recomputed - self.masked


def utilization(flops: float, seconds: float, peak_flops: float) -> float:
    """Returns the FLOP/s of a step as a share of the peak: MFU if `flops` is `Flops.model`, HFU if it is all matmuls.

    Args:
        flops: FLOPs of the step, over all devices.
        seconds: time of the step.
        peak_flops: peak FLOP/s of all devices together.

    Example:
        >>> utilization(2e15, 4.0, 1e15)
        0.5
    """
    return flops / (seconds * peak_flops)


def count_flops(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Flops:
    """Returns the FLOPs of `function(*args)` without running it; arrays may be `jax.ShapeDtypeStruct`.

    Example:
        >>> x, w = jax.ShapeDtypeStruct((8, 32), "float32"), jax.ShapeDtypeStruct((32, 64), "float32")
        >>> count_flops(lambda x, w: x @ w, x, w).matmul == 2 * 8 * 32 * 64
        True
        >>> loss = lambda w, x: (x @ w).sum()
        >>> count_flops(jax.grad(loss), w, x).matmul == 2 * 8 * 32 * 64  # the forward product is not needed
        True
    """
    return count_jaxpr(jax.make_jaxpr(function)(*args, **kwargs))


def count_matmuls(jaxpr: Any) -> int:
    """Returns how many matmuls and kernels with matmuls a jaxpr runs.

    Example:
        >>> loop = jax.jit(lambda x: jax.lax.scan(lambda x, _: (x @ x, None), x, length=5)[0] @ x)
        >>> count_matmuls(loop.trace(jax.numpy.ones((4, 4))).jaxpr)
        6
    """
    return _Counter().count(open_jaxpr(jaxpr)).calls


def count_jaxpr(jaxpr: Any) -> Flops:
    """Returns the FLOPs of a jaxpr.

    Example:
        >>> count_jaxpr(jax.jit(lambda x: x @ x).trace(jax.numpy.ones((4, 4))).jaxpr).matmul
        128
    """
    tally = _Counter().count(open_jaxpr(jaxpr))
    notes = tuple(f"{text} ({times} times)" if times > 1 else text for text, times in sorted(tally.notes.items()))
    by_dtype = dict(sorted(tally.by_dtype.items()))
    matmul = sum(by_dtype.values())
    return Flops(
        total=tally.other + matmul,
        matmul=matmul,
        recomputed=tally.recomputed,
        by_dtype=by_dtype,
        attention=tally.attention,
        moved=tally.moved,
        masked=tally.masked,
        notes=notes,
    )


CAUSAL_SCOPE = "causal_products"
"""Name of the `jax.named_scope` around matmuls of which a causal mask drops half."""
_NOT_SEPARATED = "recomputation of a `jax.checkpoint` could not be separated from its gradients"


@dataclass
class Tally:
    """Running counts with the fields of `Flops`; `other` counts everything except matmuls, and `calls` the matmuls."""

    other: int = 0
    recomputed: int = 0
    attention: int = 0
    moved: int = 0
    masked: int = 0
    calls: int = 0
    by_dtype: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)

    @property
    def matmul(self) -> int:
        return sum(self.by_dtype.values())

    def add(self, more: Tally, times: int = 1) -> Tally:
        """Adds another tally `times` times, its notes once, and returns `self`."""
        self.other += times * more.other
        self.recomputed += times * more.recomputed
        self.attention += times * more.attention
        self.moved += times * more.moved
        self.masked += times * more.masked
        self.calls += times * more.calls
        for dtype, count in more.by_dtype.items():
            self.by_dtype[dtype] += times * count
        self.notes.update(more.notes)
        return self


def matmul_flops(results: Iterable[int], contracted: Iterable[int]) -> int:
    """Returns the FLOPs of a matmul or convolution from the sizes of its result and of its contracted dims.

    Example:
        >>> matmul_flops((8, 64), (32,)) == 2 * 8 * 32 * 64
        True
    """
    return 2 * math.prod(results) * math.prod(contracted)


# --- Kernels ---

_KERNELS: dict[str, Callable[[Any], Tally]] = {}


def register_cost(kernel: str, cost: Callable[[Any], Tally] | None = None, *, linear_in: Sequence[int] = ()) -> None:
    """Registers the cost of a kernel that JAX cannot look into.

    Args:
        kernel: name of the kernel (`pallas_call(..., name=...)`).
        cost: maps the kernel's equation in a jaxpr to its FLOPs (default: one per element of its results).
        linear_in: indices of the operands in which its results are jointly linear; negative ones count from the end.
    """
    _KERNELS[kernel], LINEAR_KERNELS[kernel] = cost or _per_result, linear_in


# --- Walking a jaxpr ---


class _Counter:
    """Walks jaxprs, memoized so that repeated layers are counted once."""

    def __init__(self) -> None:
        self._known: dict[Any, tuple[Any, Tally]] = {}

    def count(self, jaxpr: Any, gradients: Sequence[bool] | None = None) -> Tally:
        """Counts a jaxpr; in a checkpointed block, `gradients` marks the inputs that carry gradients."""
        key = (id(jaxpr), None if gradients is None else tuple(gradients))
        if key not in self._known:
            tally = Tally()
            carried = None if gradients is None else spread(jaxpr, gradients)
            for number, equation in _needed(jaxpr):
                here = None if carried is None else carried[number]
                tally.add(self._equation(equation, here))
            self._known[key] = (jaxpr, tally)  # keeps the jaxpr alive, so that its id stays unique
        return self._known[key][1]

    def _equation(self, equation: Any, gradients: list[bool] | None) -> Tally:
        again, name = gradients is not None and not any(gradients), equation.primitive.name
        if is_opaque(name):
            tally = _called(_KERNELS.get(kernel_name(equation), _unknown)(equation))
        elif name in _COSTS:
            tally = _called(_COSTS[name](equation))
        else:
            tally = _CALLS.get(name, _inner)(self, equation, None if again else gradients)
        if not tally.masked and CAUSAL_SCOPE in str(equation.source_info.name_stack):
            tally = replace(tally, masked=(tally.matmul - tally.recomputed) // 2)
        if again:
            # All of it is recomputed, so a note about an inner block no longer applies.
            notes = Counter({text: times for text, times in tally.notes.items() if text != _NOT_SEPARATED})
            tally = replace(tally, recomputed=tally.matmul, masked=0, notes=notes)
        return tally


def _called(tally: Tally) -> Tally:
    return replace(tally, calls=1) if tally.by_dtype else tally


def _needed(jaxpr: Any) -> Iterator[tuple[int, Any]]:
    """Yields the live equations with their indices, last first; compilers drop the others."""
    live = {id(var) for var in jaxpr.outvars}
    for number in reversed(range(len(jaxpr.eqns))):
        equation = jaxpr.eqns[number]
        if equation.effects or any(id(var) in live for var in equation.outvars):
            live.update(id(value) for value in equation.invars)
            yield number, equation


# --- Cost of one equation ---


def _matmul(flops: Callable[[Any], int]) -> Callable[[Any], Tally]:
    def cost(equation: Any) -> Tally:
        wider = max((value.aval.dtype for value in equation.invars[:2]), key=lambda dtype: dtype.itemsize)
        moved = sum(map(_bytes, (*equation.invars, *equation.outvars)))
        return Tally(by_dtype=Counter({wider.name: flops(equation)}), moved=moved)

    return cost


def _dot_flops(equation: Any) -> int:
    numbers = equation.params.get("dimension_numbers")
    if numbers is None:
        numbers = equation.params["ragged_dot_dimension_numbers"].dot_dimension_numbers
    (contracted, _), _ = numbers
    shape = equation.invars[0].aval.shape
    return matmul_flops(equation.outvars[0].aval.shape, (shape[dim] for dim in contracted))


def _conv_flops(equation: Any) -> int:
    kernel = equation.invars[1].aval.shape
    dims = equation.params["dimension_numbers"].rhs_spec  # output features, input features, the rest
    return matmul_flops(equation.outvars[0].aval.shape, (kernel[dim] for dim in dims[1:]))


def _attention(equation: Any) -> Tally:
    """Counts cuDNN's attention, which skips the masked half under a causal mask."""
    # The backward pass has five products, the first of which is recomputed.
    products, again = (5, 1) if "_bwd" in equation.primitive.name else (2, 0)
    query, value = equation.invars[0].aval.shape, equation.invars[2].aval.shape
    heads, queries, keys = query[2], query[1], value[1]
    if equation.params["layout"] == 1:  # [B, N, T, H] instead of [B, T, N, H]
        heads, queries, keys = query[1], query[2], value[2]
    causal = "CAUSAL" in str(equation.params["mask_type"]).upper()
    one = matmul_flops((query[0], heads, queries, keys), (query[-1],)) // (2 if causal else 1)
    tally = _matmul(lambda _: products * one)(equation)
    return replace(tally, attention=tally.matmul, recomputed=again * one)


def _per_result(equation: Any) -> Tally:
    return Tally(other=sum(map(_size, equation.outvars)))


def _per_operand(equation: Any) -> Tally:
    return Tally(other=sum(map(_size, equation.invars)))


def _unknown(equation: Any) -> Tally:
    name = f"{equation.primitive.name} {kernel_name(equation)}".strip()
    return Tally(notes=Counter([f"`{name}` is not counted: JAX cannot look into it"]))


def _size(value: Any) -> int:
    return math.prod(value.aval.shape)


def _bytes(value: Any) -> int:
    return _size(value) * int(value.aval.dtype.itemsize)


_ELEMENTWISE = names(
    "add sub mul div rem pow integer_pow neg abs sign max min exp exp2 expm1 log log1p sqrt rsqrt cbrt square "
    "sin cos tan sinh cosh tanh asin acos atan atan2 logistic erf erfc erf_inv lgamma digamma add_any clamp "
    "floor ceil round nextafter select_n"
)
_REDUCTIONS = names("reduce_sum reduce_max reduce_min reduce_prod argmax argmin cumsum cumprod cummax")
_SCATTERS = [f"scatter{sign}{what}" for sign in "-_" for what in ("add", "sub", "mul", "min", "max")]
_ATTENTION = [f"dot_product_attention_{way}{kind}" for way in ("fwd", "bwd") for kind in ("", "_wrapper")]
_COSTS: dict[str, Callable[[Any], Tally]] = {
    **dict.fromkeys(("dot_general", "ragged_dot_general"), _matmul(_dot_flops)),
    "conv_general_dilated": _matmul(_conv_flops),
    **dict.fromkeys(_ATTENTION, _attention),
    **dict.fromkeys(_ELEMENTWISE, _per_result),
    **dict.fromkeys(_REDUCTIONS, _per_operand),
    **dict.fromkeys(_SCATTERS, lambda equation: Tally(other=_size(equation.invars[2]))),
    **dict.fromkeys(WITHOUT_INSIDE, lambda equation: Tally()),
}


# --- Cost of equations that call other jaxprs ---

_Marks = list[bool] | None


def _cond(counter: _Counter, equation: Any, gradients: _Marks) -> Tally:
    branches = [counter.count(open_jaxpr(b), gradients and gradients[1:]) for b in equation.params["branches"]]
    tally = Tally().add(max(branches, key=lambda branch: (branch.matmul, branch.other)))
    if len({branch.matmul for branch in branches}) > 1:
        tally.notes["only the branch of a `cond` with the most matmuls is counted"] += 1
    return tally


def _while(counter: _Counter, equation: Any, gradients: _Marks) -> Tally:
    tally = Tally().add(counter.count(open_jaxpr(equation.params["body_jaxpr"])))
    if tally.matmul:
        tally.notes["a `while` loop of unknown length is counted once"] += 1
    return tally


def _scan(counter: _Counter, equation: Any, gradients: _Marks) -> Tally:
    body = counter.count(open_jaxpr(equation.params["jaxpr"]), gradients and scan_marks(equation, gradients))
    return Tally().add(body, equation.params["length"])


def _shard_map(counter: _Counter, equation: Any, gradients: _Marks) -> Tally:
    params = equation.params
    axes = params.get("newly_manual_axes", params.get("manual_axes"))
    assert axes is not None, "shard_map has different parameters in this jax"
    devices = math.prod(params["mesh"].shape[axis] for axis in axes)
    inside = counter.count(open_jaxpr(params["jaxpr"]), gradients)
    return replace(Tally().add(inside, devices), calls=inside.calls)


def _checkpoint(counter: _Counter, equation: Any, gradients: _Marks) -> Tally:
    """Counts a block; in a backward pass, operations that depend on no incoming gradient are recomputed."""
    if not equation.params.get("differentiated") or gradients is not None:
        return _inner(counter, equation, gradients)
    block = open_jaxpr(equation.params["jaxpr"])
    count = num_gradients(block)
    if count:
        first = len(block.invars) - count
        return counter.count(block, [number >= first for number in range(len(block.invars))])
    tally = Tally().add(counter.count(block))
    if tally.matmul:
        tally.notes[_NOT_SEPARATED] += 1
    return tally


def _inner(counter: _Counter, equation: Any, gradients: _Marks) -> Tally:
    """Counts the jaxprs that an equation calls, such as a `jit`; most have none."""
    tally = Tally()
    for inner in inner_jaxprs(equation.params):
        same = gradients is not None and len(inner.invars) == len(gradients)
        tally.add(counter.count(inner, gradients if same else None))
    return tally


_CALLS: dict[str, Callable[[_Counter, Any, _Marks], Tally]] = {
    "cond": _cond,
    "while": _while,
    "scan": _scan,
    "shard_map": _shard_map,
    **dict.fromkeys(("remat2", "remat", "checkpoint"), _checkpoint),
}
