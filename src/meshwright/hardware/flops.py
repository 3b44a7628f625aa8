"""Floating-point operations of a function, counted on its jaxpr: loops by their length, every device of a `shard_map`.

Compilers count the body of a loop once and know nothing of kernels; here a scan over layers counts as the same layers
written out. What cannot be counted (kernels written by hand, loops of unknown length) is named in `Flops.notes`.

In a program that was differentiated, `jax.checkpoint` leaves its block in the backward pass: there, what does not
depend on an incoming gradient is computed again. That is how `Flops.recomputed` is told from the rest.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax


@dataclass(frozen=True)
class Flops:
    """Operations of all devices together; a multiplication and an addition are two.

    Args:
        total: matmuls, convolutions, elementwise arithmetic and reductions.
        matmul: those of matmuls and convolutions: what peaks of chips are about.
        recomputed: those of matmuls that `jax.checkpoint` made the backward pass do again.
        by_dtype: those of matmuls by the dtype of their wider operand.
        attention: of them, those of attention kernels, which do not reach the rate of plain matmuls.
        moved: bytes of all operands and results of matmuls, each read or written once.
        notes: what was not counted, or could not be counted exactly.
    """

    total: int
    matmul: int
    recomputed: int = 0
    by_dtype: Mapping[str, int] = field(default_factory=dict)
    attention: int = 0
    moved: int = 0
    notes: tuple[str, ...] = ()

    @property
    def model(self) -> int:
        """What matmuls need when nothing is computed twice: the numerator of MFU."""
        return self.matmul - self.recomputed


def count_flops(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Flops:
    """Returns the operations of `function(*args)`; nothing is computed. Arrays may be `jax.ShapeDtypeStruct`.

    Example:
        >>> x, w = jax.ShapeDtypeStruct((8, 32), "float32"), jax.ShapeDtypeStruct((32, 64), "float32")
        >>> count_flops(lambda x, w: x @ w, x, w).matmul == 2 * 8 * 32 * 64
        True
        >>> loss = lambda w, x: (x @ w).sum()
        >>> count_flops(jax.grad(loss), w, x).matmul == 2 * 8 * 32 * 64  # the product itself is not needed
        True
    """
    return count_jaxpr(jax.make_jaxpr(function)(*args, **kwargs))


def count_jaxpr(jaxpr: Any) -> Flops:
    """Returns the operations of a jaxpr, such as `jax.jit(f).trace(*args).jaxpr`."""
    tally = _Counter().count(_open(jaxpr))
    notes = tuple(f"{text} ({times} times)" if times > 1 else text for text, times in sorted(tally.notes.items()))
    by_dtype = dict(sorted(tally.by_dtype.items()))
    matmul = sum(by_dtype.values())
    return Flops(tally.other + matmul, matmul, tally.recomputed, by_dtype, tally.attention, tally.moved, notes)


_NOT_TOLD = "of a `jax.checkpoint`, what is computed again could not be told from the rest"


@dataclass
class _Tally:
    other: int = 0
    recomputed: int = 0
    attention: int = 0
    moved: int = 0
    by_dtype: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)

    @property
    def matmul(self) -> int:
        return sum(self.by_dtype.values())

    def add(self, more: _Tally, times: int = 1) -> None:
        self.other += times * more.other
        self.recomputed += times * more.recomputed
        self.attention += times * more.attention
        self.moved += times * more.moved
        for dtype, count in more.by_dtype.items():
            self.by_dtype[dtype] += times * count
        self.notes.update(more.notes)


class _Counter:
    """Walks jaxprs; those seen before are not walked again, which many layers written out need."""

    def __init__(self) -> None:
        self._known: dict[Any, tuple[Any, _Tally]] = {}

    def count(self, jaxpr: Any, gradients: Sequence[bool] | None = None) -> _Tally:
        """Counts a jaxpr. `gradients`: inside of a checkpointed block, which of its inputs carry gradients."""
        key = (id(jaxpr), None if gradients is None else tuple(gradients))
        if key not in self._known:
            tally = _Tally()
            carried = None if gradients is None else _spread(jaxpr, gradients)
            for number, equation in _needed(jaxpr):
                here = None if carried is None else carried[number]
                tally.add(self._equation(equation, here))
            self._known[key] = (jaxpr, tally)  # kept, so that no other jaxpr gets its id
        return self._known[key][1]

    def _equation(self, equation: Any, gradients: list[bool] | None) -> _Tally:
        again = gradients is not None and not any(gradients)
        tally = self._count_equation(equation, None if again else gradients)
        if again:
            # All of it: blocks within it need not be told apart.
            notes = Counter({text: times for text, times in tally.notes.items() if text != _NOT_TOLD})
            tally = replace(tally, recomputed=tally.matmul, notes=notes)
        return tally

    def _count_equation(self, equation: Any, gradients: list[bool] | None) -> _Tally:
        name, params, tally = equation.primitive.name, equation.params, _Tally()
        if name in _MATMULS:
            wider = max((value.aval.dtype for value in equation.invars[:2]), key=lambda dtype: dtype.itemsize)
            tally.by_dtype[wider.name] += _MATMULS[name](equation)
            tally.moved += sum(map(_bytes, (*equation.invars, *equation.outvars)))
            if name.startswith("dot_product_attention"):
                tally.attention += tally.matmul
            if name.startswith("dot_product_attention_bwd"):
                tally.recomputed += tally.matmul // 5
        elif _kernel_name(equation) == _WRITES_PRODUCT:
            rows, w = (value.aval for value in equation.invars[:2])
            product = rows.shape[0] * w.shape[1]  # the array that it is written into is larger
            tally.by_dtype[rows.dtype.name] += 2 * product * rows.shape[1]
            tally.moved += sum(map(_bytes, equation.invars[:2])) + product * rows.dtype.itemsize
        elif _kernel_name(equation) in _KERNELS:
            tally.other += sum(map(_size, equation.outvars))
        elif name in _OPAQUE or "callback" in name:
            tally.notes[f"`{_kernel_name(equation)}` is not counted: JAX does not know what is inside"] += 1
        elif name == "cond":
            branches = [self.count(_open(b), gradients and gradients[1:]) for b in params["branches"]]
            tally.add(max(branches, key=lambda branch: (branch.matmul, branch.other)))
            if len({branch.matmul for branch in branches}) > 1:
                tally.notes["of a `cond`, the branch with the most matmuls is counted"] += 1
        elif name == "while":
            inner = self.count(_open(params["body_jaxpr"]))
            tally.add(inner)
            if inner.matmul:
                tally.notes["a `while` loop of unknown length is counted once"] += 1
        elif name == "scan":
            body = _open(params["jaxpr"])
            tally.add(self.count(body, gradients and _scan_marks(equation, gradients)), params["length"])
        elif name == "shard_map":
            axes = params.get("newly_manual_axes", params.get("manual_axes"))
            assert axes is not None, "this jax describes shard_map in another way"
            devices = math.prod(params["mesh"].shape[axis] for axis in axes)
            tally.add(self.count(_open(params["jaxpr"]), gradients), devices)
        elif name in _REMAT and params.get("differentiated") and gradients is None:
            tally.add(self._checkpointed(_open(params["jaxpr"])))
        elif name in _ELEMENTWISE:
            tally.other += sum(math.prod(out.aval.shape) for out in equation.outvars)
        elif name.startswith(_REDUCTIONS):
            tally.other += sum(_size(value) for value in equation.invars)
        elif name.startswith(("scatter-", "scatter_")):
            tally.other += _size(equation.invars[2])
        elif name not in _WITHOUT_INSIDE:
            for inner in _inside(params):
                same = gradients is not None and len(inner.invars) == len(gradients)
                tally.add(self.count(inner, gradients if same else None))
        return tally

    def _checkpointed(self, block: Any) -> _Tally:
        """Counts a block in a backward pass: what depends on no gradient that comes in is computed again."""
        count = _num_gradients(block)
        if count == 0:
            tally = _Tally()
            tally.add(self.count(block))
            if tally.matmul:
                tally.notes[_NOT_TOLD] += 1
            return tally
        first = len(block.invars) - count
        return self.count(block, [number >= first for number in range(len(block.invars))])


# --- Where gradients go in a checkpointed block ---


def _num_gradients(block: Any) -> int:
    """Returns how many of a block's last inputs are gradients: as many as its results are linear in, together."""
    size = len(block.invars)
    for count in range(1, size + 1):
        marks = [number >= size - count for number in range(size)]
        if _results(block, marks, linear=True) is None:
            return count - 1
    return size


def _spread(jaxpr: Any, marks: Sequence[bool]) -> list[list[bool]]:
    """Returns, for every equation, which of its inputs depend on the marked inputs of the jaxpr."""
    rows: list[list[bool]] = []
    _results(jaxpr, marks, linear=False, rows=rows)
    return rows


def _results(
    jaxpr: Any, marks: Sequence[bool], *, linear: bool, rows: list[list[bool]] | None = None
) -> list[bool] | None:
    """Returns which results depend on the marked inputs; None where `linear` is asked for and one is not linear."""
    marked = {id(var) for var, mark in zip(jaxpr.invars, marks, strict=True) if mark}
    for equation in jaxpr.eqns:
        here = [id(value) in marked for value in equation.invars]
        if rows is not None:
            rows.append(here)
        if any(here):
            results = _equation_results(equation, here, linear=linear)
            if results is None:
                return None
            marked.update(id(var) for var, mark in zip(equation.outvars, results, strict=True) if mark)
    return [id(var) in marked for var in jaxpr.outvars]


def _equation_results(equation: Any, here: list[bool], *, linear: bool) -> list[bool] | None:
    name, params = equation.primitive.name, equation.params
    if name == "optimization_barrier":
        return here
    if name == "scan":
        body, carried = _open(params["jaxpr"]), _scan_marks(equation, here)
        return _results(body, carried, linear=linear)
    if name == "cond":
        branches = [_results(_open(branch), here[1:], linear=linear) for branch in params["branches"]]
        if linear and (here[0] or any(branch is None for branch in branches)):
            return None
        return [here[0] or any(marks) for marks in zip(*(branch or () for branch in branches), strict=True)]
    inner = [jaxpr for jaxpr in _inside(params) if len(jaxpr.invars) == len(here)]
    if len(inner) == 1 and len(inner[0].outvars) == len(equation.outvars) and name not in _WITHOUT_INSIDE:
        return _results(inner[0], here, linear=linear)
    return [True] * len(equation.outvars) if not linear or _is_linear(_kernel_name(equation), here) else None


def _is_linear(name: str, here: list[bool]) -> bool:
    """Returns whether an operation is linear in those of its operands that are marked, together."""
    if name in _KERNELS:
        return not any(mark for place, mark in enumerate(here) if place not in _KERNELS[name])
    if name in _BILINEAR:
        return sum(here) == 1
    if name in _LINEAR_IN_FIRST:
        return not any(here[1:])
    if name == "select_n":
        return not here[0]
    if name == "dynamic_update_slice":
        return not any(here[2:])
    if name.startswith(("scatter-add", "scatter_add")):
        return not here[1]
    if name.startswith("dot_product_attention_bwd"):
        return not any(here[:-1])
    return name in _LINEAR


def _scan_marks(equation: Any, marks: Sequence[bool]) -> list[bool]:
    """Returns which inputs of a scan's body depend on the marked inputs of the scan, in any of its rounds."""
    body, marks = _open(equation.params["jaxpr"]), list(marks)
    # Constants, then what is carried, then what is sliced: only the last have a dim more outside. jax 0.11 renamed the
    # parameters that would say so.
    num_carry = sum(out.aval.ndim == inner.aval.ndim for out, inner in zip(equation.outvars, body.outvars, strict=True))
    end = sum(out.aval.ndim == inner.aval.ndim for out, inner in zip(equation.invars, body.invars, strict=True))
    begin = end - num_carry
    while True:
        results = _results(body, marks, linear=False) or []
        carried = [old or new for old, new in zip(marks[begin:end], results[: end - begin], strict=True)]
        if carried == marks[begin:end]:
            return marks
        marks[begin:end] = carried


# --- Equations ---


def _needed(jaxpr: Any) -> Iterator[tuple[int, Any]]:
    """Yields the equations that results depend on, with their numbers, from the last: compilers drop the others."""
    live = {id(var) for var in jaxpr.outvars}
    for number in reversed(range(len(jaxpr.eqns))):
        equation = jaxpr.eqns[number]
        if equation.effects or any(id(var) in live for var in equation.outvars):
            live.update(id(value) for value in equation.invars)
            yield number, equation


def _open(jaxpr: Any) -> Any:
    return getattr(jaxpr, "jaxpr", jaxpr)


def _inside(params: Mapping[str, Any]) -> Iterator[Any]:
    for value in params.values():
        for part in value if isinstance(value, (tuple, list)) else (value,):
            inner = _open(part)
            if hasattr(inner, "eqns"):
                yield inner


def _size(value: Any) -> int:
    return _product(value.aval.shape)


def _bytes(value: Any) -> int:
    return _size(value) * int(value.aval.dtype.itemsize)


def _product(sizes: Iterable[int]) -> int:
    return math.prod(sizes)


def _kernel_name(equation: Any) -> str:
    """Returns the name of an operation; of one that JAX does not look into, with its own."""
    if equation.primitive.name not in _OPAQUE and "callback" not in equation.primitive.name:
        return str(equation.primitive.name)
    known = equation.params.get("name") or equation.params.get("name_and_src_info") or ""
    text = str(getattr(known, "name", known))
    return f"{equation.primitive.name} {text}".strip()


def _dot_flops(equation: Any) -> int:
    (contracted, _), _ = equation.params["dimension_numbers"]
    shape = equation.invars[0].aval.shape
    return 2 * _size(equation.outvars[0]) * _product(shape[dim] for dim in contracted)


def _conv_flops(equation: Any) -> int:
    kernel = equation.invars[1].aval.shape
    dims = equation.params["dimension_numbers"].rhs_spec  # output features, input features, the rest
    return 2 * _size(equation.outvars[0]) * _product(kernel[dim] for dim in dims[1:])


def _ragged_dot_flops(equation: Any) -> int:
    numbers = equation.params["ragged_dot_dimension_numbers"].dot_dimension_numbers
    (contracted, _), _ = numbers
    shape = equation.invars[0].aval.shape
    return 2 * _size(equation.outvars[0]) * _product(shape[dim] for dim in contracted)


def _attention_flops(products: int) -> Callable[[Any], int]:
    def count(equation: Any) -> int:
        query, value = equation.invars[0].aval.shape, equation.invars[2].aval.shape
        by_heads = equation.params["layout"] == 1  # [B, N, T, H] instead of [B, T, N, H]
        heads, keys = query[1 if by_heads else 2], value[2 if by_heads else 1]
        queries = query[2 if by_heads else 1]
        causal = "CAUSAL" in str(equation.params["mask_type"]).upper()
        whole = _product((2 * products, query[0], heads, queries, keys, query[-1]))
        return whole // 2 if causal else whole

    return count


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# cuDNN's attention skips what a causal mask hides. Backwards it makes five products, the first of them again.
_MATMULS: dict[str, Callable[[Any], int]] = {
    "dot_general": _dot_flops,
    "conv_general_dilated": _conv_flops,
    "ragged_dot_general": _ragged_dot_flops,
    "dot_product_attention_fwd_wrapper": _attention_flops(2),
    "dot_product_attention_fwd": _attention_flops(2),
    "dot_product_attention_bwd_wrapper": _attention_flops(5),
    "dot_product_attention_bwd": _attention_flops(5),
}
_OPAQUE = ("pallas_call", "mpmd_map", "ffi_call", "custom_call", "triton_kernel_call", "mosaic_gpu_call")
# The one kernel of ours that is a matmul: `meshwright.parallel.kernels.matmul_kernel`.
_WRITES_PRODUCT = "mpmd_map write_product"
# The others (`meshwright.parallel.kernels.dispatch`): the operands that each is linear in, together.
_KERNELS: dict[str, range] = {
    "pallas_call cut_columns": range(1),
    "pallas_call residual_norm_gradient": range(1, 3),
    "pallas_call softmax_gradient": range(2, 3),
    "pallas_call stack": range(256),
}
_REMAT = ("remat2", "remat", "checkpoint")
_ELEMENTWISE = _names(
    "add sub mul div rem pow integer_pow neg abs sign max min exp exp2 expm1 log log1p sqrt rsqrt cbrt square "
    "sin cos tan sinh cosh tanh asin acos atan atan2 logistic erf erfc erf_inv lgamma digamma add_any clamp "
    "floor ceil round nextafter select_n"
)
_REDUCTIONS = (
    "reduce_sum",
    "reduce_max",
    "reduce_min",
    "reduce_prod",
    "argmax",
    "argmin",
    "cumsum",
    "cumprod",
    "cummax",
)
_WITHOUT_INSIDE = _names("sort reduce reduce_window reduce_precision select_and_scatter_add")
_BILINEAR = _names("mul dot_general conv_general_dilated ragged_dot_general")
_LINEAR_IN_FIRST = _names("div dynamic_slice gather sharding_constraint reduce_precision")
_LINEAR = _names(
    "add add_any sub neg transpose reshape broadcast_in_dim squeeze expand_dims reduce_sum "
    "convert_element_type copy copy_p slice pad concatenate rev cumsum psum psum_invariant psum2 pvary pcast "
    "pbroadcast all_gather all_gather_invariant all_gather_reduced reduce_scatter unreduced_reduce_scatter "
    "psum_scatter all_to_all ppermute real imag complex conj name stop_gradient device_put reshard split stack "
    "unstack"
)
