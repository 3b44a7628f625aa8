"""The view of a step: chosen from the mesh and from the axes that the loss communicates over, or checked if forced."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from meshwright.errors import JobError, MeshError, MeshwrightError, did_you_mean
from meshwright.mesh.current import AnyMesh, require_axes
from meshwright.models.execution import DATA_AXES
from meshwright.train.job import loss_axes

View = Literal["global", "local"]

GATHER_AXES = ("fsdp",)
"""The axes over which a step gathers parameters for the loss in the local view."""

PIPELINE_AXES = ("pp",)
"""The axes whose devices have different layers in the local view."""


# Phrases in JAX's errors about the axes along which values vary, in versions 0.10 to 0.12.
_VARYING = ("manual axis types", "varying manual axes")


class ViewChoice(NamedTuple):
    """The view of a step, and the reason for it."""

    view: View
    reason: str

    def __str__(self) -> str:
        return f"{self.view} ({self.reason})"


def choose_view(
    job: Any, mesh: AnyMesh | Mapping[str, int], *, data_axes: str | Sequence[str] | None = None
) -> ViewChoice:
    """Chooses the view in which a job runs on a mesh.

    The local view is chosen if every axis of size 2 or more splits rows, is `fsdp`, or is an axis that the loss
    communicates over (`Job.local_axes`, or the axes of a language model's `Execution`), and if the job has no
    `model_state`. Otherwise XLA inserts the collectives, in the global view.

    Args:
        mesh: a mesh, or the size of each axis by name.
        data_axes: the axes that split rows (default: `dp` and `fsdp`).

    Example:
        >>> import meshwright as mw
        >>> job = mw.Job(init=lambda key: {}, rules=[])
        >>> print(choose_view(job, {"dp": 4, "fsdp": 2}))
        local (the step handles every axis of the mesh: dp, fsdp)
        >>> print(choose_view(job, {"dp": 4, "tp": 2}))
        global (the loss does not communicate over tp)
    """
    unknown = unknown_axes(job, mesh, data_axes=data_axes)
    if unknown:
        return ViewChoice("global", f"the loss does not communicate over {' and '.join(unknown)}")
    if getattr(job, "model_state", None) is not None:
        return ViewChoice("global", "the model state depends on the whole batch")
    split = [axis for axis, size in _sizes(mesh).items() if size > 1]
    known = f"the step handles every axis of the mesh: {', '.join(split)}" if split else "the mesh has one device"
    return ViewChoice("local", known)


def resolve_view(
    job: Any,
    mesh: AnyMesh | Mapping[str, int],
    view: View | None,
    *,
    data_axes: str | Sequence[str] | None = None,
) -> ViewChoice:
    """Returns the chosen view for None; raises if a forced view is unknown, or is local and the loss cannot run in it.

    Example:
        >>> import meshwright as mw
        >>> resolve_view(mw.Job(init=lambda key: {}, rules=[]), {"tp": 2}, "local")
        Traceback (most recent call last):
        meshwright.errors.MeshError: the loss does not communicate over mesh axis 'tp' (2 devices): it works on ...
        hint: use view="global" (--view global), or communicate over the axis in the loss and declare it: ...
    """
    if view is None:
        return choose_view(job, mesh, data_axes=data_axes)
    if view not in ("global", "local"):
        hint = did_you_mean(str(view), ("global", "local")) or "use 'global' or 'local', or None to choose."
        raise MeshwrightError(f"unknown view {view!r}.", hint=hint)
    if view == "local" and (unknown := unknown_axes(job, mesh, data_axes=data_axes)):
        sizes, several = _sizes(mesh), len(unknown) > 1
        named = " and ".join(f"{axis!r} ({sizes[axis]} devices)" for axis in unknown)
        declared = ", ".join(f'"{axis}"' for axis in unknown) + ("" if several else ",")
        raise MeshError(
            f"the loss does not communicate over mesh {'axes' if several else 'axis'} {named}: it works on whole "
            "parameters, but the local view gives it slices.",
            hint=f'use view="global" (--view global), or communicate over the {"axes" if several else "axis"} in the '
            f"loss and declare {'them' if several else 'it'}: Job(local_axes=({declared})).",
        )
    return ViewChoice(view, "as requested")


def unknown_axes(
    job: Any, mesh: AnyMesh | Mapping[str, int], *, data_axes: str | Sequence[str] | None = None
) -> list[str]:
    """Returns the axes of size 2 or more that keep a loss from running in the local view.

    Example:
        >>> import meshwright as mw
        >>> job = mw.Job(init=lambda key: {}, rules=[], local_axes=("tp",))
        >>> unknown_axes(job, {"dp": 2, "tp": 2, "sp": 2})
        ['sp']
    """
    known = (*data_axes_of(mesh, data_axes), *GATHER_AXES, *loss_axes(job))
    return [axis for axis, size in _sizes(mesh).items() if size > 1 and axis not in known]


def data_axes_of(mesh: AnyMesh | Mapping[str, int], asked: str | Sequence[str] | None = None) -> tuple[str, ...]:
    """Returns the axes that split the rows of a batch (default: the usual data axes that the mesh has)."""
    sizes = _sizes(mesh)
    if asked is None:
        return tuple(axis for axis in DATA_AXES if axis in sizes)
    axes = (asked,) if isinstance(asked, str) else tuple(asked)
    if not isinstance(mesh, Mapping):
        require_axes(mesh, axes, where="data_axes")
    return axes


def sync_needs_local_view(sync: str, choice: ViewChoice) -> MeshwrightError:
    """Returns the error for a sync mode in the global view."""
    return MeshwrightError(
        f"sync={sync!r} works only in the local view, but this step runs in the global view ({choice.reason}), in "
        "which XLA decides when to reduce gradients.",
        hint="leave out sync.",
    )


@contextlib.contextmanager
def view_errors(choice: ViewChoice) -> Iterator[None]:
    """Explains JAX's errors about values that vary between devices in the local view."""
    try:
        yield
    except TypeError as error:
        if choice.view == "global" or not any(words in str(error) for words in _VARYING):
            raise
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise JobError(
            f"the loss cannot be traced in the local view ({choice.reason}), in which values vary between devices.\n"
            + "\n".join(lines[:2]),
            hint='pass view="global" (--view global), or derive initial carries of loops from the data, for example '
            "jnp.zeros_like(x) instead of jnp.zeros(x.shape).",
        ) from error


def _sizes(mesh: AnyMesh | Mapping[str, int]) -> dict[str, int]:
    return dict(mesh if isinstance(mesh, Mapping) else mesh.shape)
