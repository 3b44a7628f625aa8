"""What makes collectives asynchronous on which chip: the compiler's default, and the option that changes it.

Read off programs of one gather, scatter or sum beside a matmul, compiled with and without each option (libtpu 0.0.42).
Gathers over two or three dims of the torus need the option's 2d or 3d form, scatters its nd form.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_OFFLOAD = "xla_tpu_enable_sparse_core_collective_offload_"
_SPARSE_CORES = {
    "all-gather": (f"{_OFFLOAD}all_gather", "with its 2d_ and 3d_ forms"),
    "reduce-scatter": (f"{_OFFLOAD}reduce_scatter", "with its nd_ form"),
    "all-reduce": (f"{_OFFLOAD}all_reduce", ""),
}
OPTIONS: Mapping[str, Mapping[str, tuple[str, str]]] = {"v5p": _SPARSE_CORES, "v6e": _SPARSE_CORES}
# There, scatters stay scatters with the same option, but wait all the same.
KEEPS_SCATTERS = ("v5e", "v5p", "v6e")
SYNCHRONOUS: Mapping[str, tuple[str, ...]] = {"v5e": ("all-reduce", "reduce-scatter")}


def sync_advice(chip: str, platform: str, kind: str, source: str, options: Mapping[str, Any]) -> str:
    """Returns why a collective is synchronous on a chip, and the option that changes it; "" where nothing is known.

    Example:
        >>> sync_advice("v5e", "tpu", "all-reduce", "jit(step)/psum", {})
        'the default of v5e, and no option is known that changes it'
    """
    if kind == "all-reduce" and "scatter" in source:
        option, forms = _SPARSE_CORES["reduce-scatter"]
        if chip not in KEEPS_SCATTERS or option in options:
            return ""
        return f"the option {_named(option, forms)} keeps it one"
    if kind in OPTIONS.get(chip, {}):
        option, forms = OPTIONS[chip][kind]
        if option in options:
            return f"although the option {option} is set"
        return f"the default of {chip}; the option {_named(option, forms)} makes it asynchronous"
    if kind in SYNCHRONOUS.get(chip, ()):
        return f"the default of {chip}, and no option is known that changes it"
    if platform == "gpu" or (chip, kind) == ("v5e", "all-gather"):
        return "as the compiler found no matmul to put beside it"
    return ""


def _named(option: str, forms: str) -> str:
    return f"{option} ({forms})" if forms else option
