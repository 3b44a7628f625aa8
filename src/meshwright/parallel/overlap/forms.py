"""Which form of an overlapped matmul to use on which chip: a small table with the measurements behind it.

Measured by compiling [16384, 8192] @ [8192, 28672] in bfloat16 ahead of time (benchmarks/RESULTS.md has the runs):
hops hidden behind a matmul, the compiler's estimate of compute over that of the unsplit form, and temporary memory.
A form that looks equivalent can lose everything to the compiler's scheduling, which is why there is a table.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Literal

from meshwright.errors import PlacementError, did_you_mean
from meshwright.mesh.build import current_mesh

Operation = Literal["gather_matmul", "matmul_scatter", "gather_matmul_grad", "matmul_scatter_grad"]
Tie = Literal["none", "next", "between", "slice", "late_slice", "operand", "product"]


@dataclass(frozen=True)
class Form:
    """How shards travel and how the compiler is kept from undoing it.

    Args:
        ring: False is the unsplit form: one collective beside one matmul; or, with `parts`, several of both.
        both_ways: half of each shard travels up and half down, using both directions of each link at once.
        group: how many neighbours first pool their shards; the ring then has fewer and larger steps.
        tie: what an optimization barrier ties together at each step; see the loops in `overlap_loops`.
        parts: without a ring, the sizes of the parts that travel, relative to each other, smallest first. The transfer
            of the first one is not hidden: a gather begins with it, a scatter ends with it. See `overlap_parts`.
    """

    ring: bool = True
    both_ways: bool = False
    group: int = 1
    tie: Tie = "none"
    parts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        of_a_ring = self.ring or self.both_ways or self.group > 1 or self.tie != "none"
        if self.parts and (of_a_ring or min(self.parts) < 1):
            raise PlacementError(
                f"{self} has parts, which are positive and of whole collectives, not of a ring.",
                hint="for example Form(ring=False, parts=(1, 2, 4, 7)).",
            )


WHOLE = Form(ring=False)
PARTS = Form(ring=False, parts=(1, 2, 4, 7))

_V5E: dict[Operation, Form] = {
    # 30/30 hidden, compute 1.03, 0 MiB. Untied it is the same alone, but in a scan of layers 9 of its hops run ahead.
    "gather_matmul": Form(both_ways=True, tie="between"),
    "matmul_scatter": Form(both_ways=True, tie="operand"),  # 30/30, 1.10, 0 MiB
    "gather_matmul_grad": Form(both_ways=True, tie="operand"),  # 60/60, 1.08, 274 MiB (unsplit 512)
    "matmul_scatter_grad": Form(both_ways=True, tie="next"),  # 30/30, 1.06, 257 MiB (unsplit 256)
}
_V5P: dict[Operation, Form] = {
    "gather_matmul": Form(both_ways=True, tie="between"),  # 14/14, 1.03, 72 MiB (unsplit 256)
    "matmul_scatter": Form(both_ways=True, tie="late_slice"),  # 14/14, 1.01, 48 MiB (unsplit 256)
    "gather_matmul_grad": Form(both_ways=True, tie="late_slice"),  # 28/28, 1.01, 401 MiB (unsplit 256)
    "matmul_scatter_grad": Form(both_ways=True, tie="next"),  # 14/14, 0.99, 321 MiB (unsplit 256)
}
_V6E: dict[Operation, Form] = {
    "gather_matmul": Form(both_ways=True, tie="between"),  # 30/30, 1.02, 0 MiB
    "matmul_scatter": Form(both_ways=True, tie="slice"),  # 30/30, 1.06, 0 MiB
    "gather_matmul_grad": Form(both_ways=True, tie="slice"),  # 60/60, 1.06, 353 MiB (unsplit 256)
    "matmul_scatter_grad": Form(both_ways=True, tie="next"),  # 30/30, 1.28, 289 MiB (unsplit 256)
}
_GPU: dict[Operation, Form] = {  # 8 x H200
    "gather_matmul": Form(tie="next"),  # 7/7, 78 MiB (unsplit 256)
    "matmul_scatter": Form(tie="product"),  # 7/7, 78 MiB (unsplit 256)
    # Its two transfers hide behind its two matmuls as they are (2/2). The ring would need two hops in flight at once,
    # and XLA runs one collective at a time on a GPU (8/14).
    "gather_matmul_grad": WHOLE,
    "matmul_scatter_grad": Form(tie="next"),  # 7/7, 302 MiB (unsplit 256, 0/1)
}
# In a `jit` program with further axes: XLA would gather over those too, before a collective that is not a hop.
_GPU_ISLAND: dict[Operation, Form] = _GPU | {"gather_matmul_grad": Form(tie="product")}
# On GPUs, whole collectives in parts do better than the rings above from so many devices and so many features per
# device on (a row that is gathered meets that many columns, one that is scattered was that long); the first that fits
# counts. What they are chosen by is compute, measured on one H200, plus the transfers that are not hidden, at 370 GB/s
# for a collective, and less for a hop of a ring: benchmarks/RESULTS.md has both. Where a transfer takes as long as its
# matmul, parts are even. Narrower than any measured, all stay rings: in a 7B with tp:8, parts hid 84% of bytes for 89%.
GPU_PARTS: dict[Operation, list[tuple[int, int, Form]]] = {
    "gather_matmul": [
        (8, 3584, PARTS),  # 3/4, 218 MiB, or 240 where no kernel writes its products (unsplit 256)
        (8, 1728, Form(ring=False, parts=(1,) * 6)),  # all but one; the narrowest that was measured
    ],
    "matmul_scatter": [
        (4, 3072, PARTS),  # 3/4, 244 MiB, or 216 where XLA cuts the weight (unsplit 256)
        (4, 1728, Form(ring=False, parts=(1,) * 4)),  # 3/4; the narrowest that was measured
    ],
}
# No links to hide: the plain ring, which is what tests compare with everything else.
_CPU: dict[Operation, Form] = dict.fromkeys(_V5E, Form())

FORMS: dict[str, dict[Operation, Form]] = {"v5e": _V5E, "v5p": _V5P, "v6e": _V6E, "gpu": _GPU, "cpu": _CPU}

_NAMED = {"ring": Form(), "both_ways": Form(both_ways=True), "parts": PARTS, "whole": WHOLE}


_in_branch: ContextVar[bool] = ContextVar("in_branch", default=False)


@contextlib.contextmanager
def branch() -> Iterator[None]:
    """Marks what is traced inside as code that only some devices run: a stage of a pipeline.

    XLA's CPU backend makes every hop of a ring wait for all devices of the program, and would wait for ever there.
    Collectives by groups wait for their group only.
    """
    token = _in_branch.set(True)
    try:
        yield
    finally:
        _in_branch.reset(token)


def chip_family() -> str:
    """Returns the row of the table for the devices of the mesh in force; "cpu" where they are unknown."""
    mesh = current_mesh()
    device = getattr(mesh, "abstract_device", None)
    kind = str(getattr(device, "device_kind", "cpu")).lower()
    for name, family in (("v6", "v6e"), ("v5 lite", "v5e"), ("v5e", "v5e"), ("tpu", "v5p"), ("nvidia", "gpu")):
        if name in kind:
            return family
    return "cpu"


def choose_form(
    operation: Operation, form: Form | str | None, *, num_chunks: int | None, axis_size: int, width: int
) -> Form:
    """Returns the form to use: the caller's, or the table's for this chip.

    Args:
        num_chunks: the steps of a ring, which set the size of its groups.
        width: features per device that each travelling row is multiplied with, or is a product of.
    """
    if isinstance(form, str):
        if form not in _NAMED:
            hint = did_you_mean(form, _NAMED) or f"use one of: {', '.join(_NAMED)}, or a Form."
            raise PlacementError(f"{operation}: there is no form {form!r}.", hint=hint)
        form = _NAMED[form]
    if form is None:
        form = _from_table(operation, width=width, axis_size=axis_size, rings_only=num_chunks is not None)
    if axis_size > 1 and form.group > 1 and (axis_size % form.group or form.group == axis_size):
        raise PlacementError(
            f"{operation}: {form} pools {form.group} of {axis_size} devices.",
            hint="a group is smaller than the axis, and divides it; form='whole' pools all.",
        )
    if num_chunks is None:
        return form
    if form.parts:
        raise PlacementError(
            f"{operation}: num_chunks={num_chunks} counts the steps of a ring, and the form is in parts.",
            hint="leave num_chunks out, and give the parts: Form(ring=False, parts=(1, 1, 1, 1)).",
        )
    if not form.ring and num_chunks != 1:
        raise PlacementError(
            f"{operation}: num_chunks={num_chunks} counts the steps of a ring, and the form is unsplit.",
            hint='leave one of them out, or use form="ring".',
        )
    if num_chunks not in range(1, axis_size + 1) or axis_size % num_chunks:
        divisors = [str(count) for count in range(1, axis_size + 1) if axis_size % count == 0]
        raise PlacementError(
            f"{operation}: {num_chunks} chunks for {axis_size} devices.", hint=f"use one of: {', '.join(divisors)}."
        )
    if num_chunks == 1:
        return WHOLE
    group = axis_size // int(num_chunks)
    return replace(form, group=group, both_ways=form.both_ways and group == 1)


def _from_table(operation: Operation, *, width: int, axis_size: int, rings_only: bool) -> Form:
    family = chip_family()
    if family == "cpu" and _in_branch.get():
        return WHOLE
    if family == "gpu" and _has_automatic_axes():
        return _GPU_ISLAND[operation]
    if family == "gpu" and not rings_only:
        for least_size, least_width, form in GPU_PARTS.get(operation, []):
            if axis_size >= least_size and width >= least_width:
                return form
    return FORMS[family][operation]


def _has_automatic_axes() -> bool:
    """Whether XLA may have split arrays over axes that this code does not see."""
    mesh = current_mesh()
    return mesh is not None and any(size > 1 and axis not in mesh.manual_axes for axis, size in mesh.shape.items())
