"""Dependence and linearity of a jaxpr's results in marked inputs.

`flops` uses this for a `jax.checkpoint` block in a backward pass. Its last inputs are the incoming gradients: the
longest run of last inputs in which all results are jointly linear.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

LINEAR_KERNELS: dict[str, Sequence[int]] = {}
"""Operands in which a kernel's results are jointly linear, by kernel name; see `flops.register_cost`."""


def num_gradients(block: Any) -> int:
    """Returns the number of a block's last inputs that are gradients."""
    size = len(block.invars)
    for count in range(1, size + 1):
        marks = [number >= size - count for number in range(size)]
        if _results(block, marks, linear=True) is None:
            return count - 1
    return size


def spread(jaxpr: Any, marks: Sequence[bool]) -> list[list[bool]]:
    """Returns for every equation which of its inputs depend on the jaxpr's marked inputs."""
    rows: list[list[bool]] = []
    _results(jaxpr, marks, linear=False, rows=rows)
    return rows


def _results(
    jaxpr: Any, marks: Sequence[bool], *, linear: bool, rows: list[list[bool]] | None = None
) -> list[bool] | None:
    """Returns which results depend on the marked inputs, or None if `linear` and one of them is not linear."""
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
        body, carried = open_jaxpr(params["jaxpr"]), scan_marks(equation, here)
        return _results(body, carried, linear=linear)
    if name == "cond":
        branches = [_results(open_jaxpr(branch), here[1:], linear=linear) for branch in params["branches"]]
        if linear and (here[0] or any(branch is None for branch in branches)):
            return None
        return [here[0] or any(marks) for marks in zip(*(branch or () for branch in branches), strict=True)]
    inner = [jaxpr for jaxpr in inner_jaxprs(params) if len(jaxpr.invars) == len(here)]
    if len(inner) == 1 and len(inner[0].outvars) == len(equation.outvars) and name not in WITHOUT_INSIDE:
        return _results(inner[0], here, linear=linear)
    return [True] * len(equation.outvars) if not linear or _is_linear(equation, here) else None


def _is_linear(equation: Any, here: list[bool]) -> bool:
    """Returns whether an operation is jointly linear in its marked operands."""
    name = equation.primitive.name
    if is_opaque(name):
        linear_in = LINEAR_KERNELS.get(kernel_name(equation), ())
        places = {place % len(here) for place in linear_in}  # negative ones count from the end
        return not any(mark for place, mark in enumerate(here) if place not in places)
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


def scan_marks(equation: Any, marks: Sequence[bool]) -> list[bool]:
    """Returns which inputs of a scan's body depend on the scan's marked inputs in any iteration."""
    body, marks = open_jaxpr(equation.params["jaxpr"]), list(marks)
    # Inputs are constants, carry, slices; only slices have one more dim outside (jax 0.11 renamed the parameters).
    num_carry = sum(out.aval.ndim == inner.aval.ndim for out, inner in zip(equation.outvars, body.outvars, strict=True))
    end = sum(out.aval.ndim == inner.aval.ndim for out, inner in zip(equation.invars, body.invars, strict=True))
    begin = end - num_carry
    while True:
        results = _results(body, marks, linear=False) or []
        carried = [old or new for old, new in zip(marks[begin:end], results[: end - begin], strict=True)]
        if carried == marks[begin:end]:
            return marks
        marks[begin:end] = carried


def open_jaxpr(jaxpr: Any) -> Any:
    """Returns the open jaxpr of a possibly closed one."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def inner_jaxprs(params: Mapping[str, Any]) -> Iterator[Any]:
    """Yields the jaxprs in an equation's parameters."""
    for value in params.values():
        for part in value if isinstance(value, (tuple, list)) else (value,):
            inner = open_jaxpr(part)
            if hasattr(inner, "eqns"):
                yield inner


def kernel_name(equation: Any) -> str:
    """Returns a kernel's name as given by its author."""
    known = equation.params.get("name") or equation.params.get("name_and_src_info") or ""
    return str(getattr(known, "name", known))


def is_opaque(name: str) -> bool:
    """Returns whether JAX cannot look into a primitive."""
    return name in _OPAQUE or "callback" in name


def names(text: str) -> frozenset[str]:
    """Returns the words of a string as a set."""
    return frozenset(text.split())


_OPAQUE = names("pallas_call mpmd_map ffi_call custom_call triton_kernel_call mosaic_gpu_call")
WITHOUT_INSIDE = names("sort reduce reduce_window reduce_precision select_and_scatter_add")
_BILINEAR = names("mul dot_general conv_general_dilated ragged_dot_general")
_LINEAR_IN_FIRST = names("div dynamic_slice gather sharding_constraint reduce_precision")
_LINEAR = names(
    "add add_any sub neg transpose reshape broadcast_in_dim squeeze expand_dims reduce_sum "
    "convert_element_type copy copy_p slice pad concatenate rev cumsum psum psum_invariant psum2 pvary pcast "
    "pbroadcast all_gather all_gather_invariant all_gather_reduced reduce_scatter unreduced_reduce_scatter "
    "psum_scatter all_to_all ppermute real imag complex conj name stop_gradient device_put reshard split stack "
    "unstack"
)
