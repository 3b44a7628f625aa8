"""`verify`: compares a job's step on meshes with its step on one device."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from meshwright.errors import LayoutError, MeshError, MeshwrightError
from meshwright.models.execution import Remat
from meshwright.parallel.rows import count_rows
from meshwright.train.gradients import GATHER_AXES, View
from meshwright.train.precision import Precision
from meshwright.train.state import require_loss
from meshwright.train.sync import Sync
from meshwright.types import PyTree
from meshwright.verify import causes
from meshwright.verify.compare import compare
from meshwright.verify.diagnosis import Finding
from meshwright.verify.example_batch import example_batch
from meshwright.verify.measure import Placed, SharedInputs, measure, place, worst_copies
from meshwright.verify.meshes import (
    all_meshes,
    each_axis_alone,
    known_axes,
    make_mesh,
    mesh_text,
    pick_devices,
    reference_mesh,
)
from meshwright.verify.reference import Reference
from meshwright.verify.report import Case, VerifyReport


def verify(
    job: Any,
    *,
    optimizer: Any = None,
    meshes: str | Sequence[str] | None = None,
    views: View | Sequence[View] = ("global", "local"),
    num_minibatches: int | Sequence[int] = (1,),
    num_steps: int = 3,
    tolerance: float = 1e-5,
    batch: PyTree = None,
    seed: int = 0,
    precision: Precision | str = "float32",
    sync: Sync | None = None,
    remat: Remat = "none",
    data_axes: tuple[str, ...] | None = None,
    devices: Sequence[Any] | int | None = None,
    progress: Callable[[str], None] | None = None,
) -> VerifyReport:
    """Compares a job's step on meshes with the same step on one device.

    Compared are the initial parameters, bit for bit; the loss; every gradient; and the parameters after some steps.
    What differs is reported with its likely cause, and does not raise: see `VerifyReport.require`.

    Args:
        job: `init`, `rules`, `loss`, and a batch; see `meshwright.Job`.
        optimizer: SGD by default.
        meshes: a mesh, several, or "all": every way to split the devices over the axes that the rules know, and `dp`.
            By default the job's own mesh, or else all devices along each axis in turn. Where the job does not fit a
            mesh, it is skipped, or fails if it was asked for by name.
        views: in which views; see `make_train_step`.
        num_minibatches: in how many minibatches; always compared with one device that computes the batch whole.
        num_steps: how many steps are taken.
        tolerance: the largest error that is fine, relative to a leaf's largest gradient, or its change; ten times that
            after several steps, in which rounding grows.
        batch: a batch, instead of the job's. Without any, one is drawn from the job's shapes; see `example_batch`.
        precision: of the step. In float32, matmuls are computed with `jax.default_matmul_precision("highest")`.
        devices: all by default; some, or a number of them.
        progress: is called with a line of text before each case.

    Example:
        >>> import jax.numpy as jnp, meshwright as mw
        >>> from meshwright import P
        >>> def loss(params, batch, rng):
        ...     return jnp.mean((batch["x"] @ params["w"] - 1) ** 2), {}
        >>> job = mw.Job(
        ...     init=lambda key: {"w": jax.random.normal(key, (8,))},
        ...     rules=[("w", P("fsdp"))],
        ...     loss=loss,
        ...     batch={"x": jax.ShapeDtypeStruct((16, 8), "float32")},
        ... )
        >>> report = verify(job, meshes="fsdp:8", views="global")
        >>> report.ok, report.cases[0].verdict
        (True, 'equal')
    """
    require_loss(job, who="verify")
    if jax.process_count() > 1:
        raise MeshwrightError("verify runs in one process.", hint="run it on one host, or on simulated CPU devices.")
    if not tolerance > 0 or num_steps < 1:
        raise MeshwrightError(
            f"verify got tolerance={tolerance}, num_steps={num_steps}.", hint="a tolerance above 0, and 1 step or more."
        )
    views = (views,) if isinstance(views, str) else tuple(views)
    counts = (num_minibatches,) if isinstance(num_minibatches, int) else tuple(num_minibatches)
    if not counts or min(counts) < 1:
        raise MeshwrightError(f"verify got num_minibatches={counts}.", hint="1 or more each; 1 is the whole batch.")
    if not 0 <= seed < 2**32:
        raise MeshwrightError(f"verify got seed={seed}.", hint="a whole number from 0 to 4294967295.")
    setup = SharedInputs(
        job,
        optimizer or optax.sgd(0.1),
        example_batch(job, seed=seed) if batch is None else batch,
        num_steps,
        seed,
        precision,
        sync,
        remat,
        data_axes,
    )
    chosen = pick_devices(devices)
    axes = known_axes(job.rules, data_axes)
    texts, by_name = _wanted(job, meshes, len(chosen), axes)
    targets = [make_mesh(text, chosen) for text in texts]
    tell = progress or (lambda line: None)
    cases: list[Case] = []
    # GPUs and TPUs otherwise round what matmuls take in, and a slice's matmul not as the whole one's.
    with jax.default_matmul_precision("highest" if precision == "float32" else None):
        tell("one device")
        reference = _reference(setup, reference_mesh(axes, targets, chosen[0]))
        for mesh in targets:
            wanted = [(view, count) for view in views for count in counts]
            cases += _cases(reference, mesh, wanted, tolerance, by_name=by_name, tell=tell)
    return VerifyReport(
        tuple(cases), tolerance, num_steps, len(reference.initial), count_rows(setup.batch, who="verify")
    )


def _wanted(
    job: Any, meshes: str | Sequence[str] | None, num_devices: int, axes: dict[str, bool]
) -> tuple[list[str], bool]:
    """Returns the meshes to compare on, and whether they were asked for by name."""
    if meshes == "all":
        return all_meshes(num_devices, axes), False
    if meshes is None and getattr(job, "mesh", None):
        meshes = job.mesh
    if meshes is None:
        return each_axis_alone(num_devices, axes), False
    return [meshes] if isinstance(meshes, str) else list(meshes), True


def _reference(setup: SharedInputs, mesh: Mesh) -> Reference:
    try:
        placed = place(setup, mesh, quiet=False)
        reference = Reference(setup, placed, measure(setup, placed, view="global", num_minibatches=1))
    except Exception as error:
        error.add_note("This is the step on one device, which a mesh would be compared with.")
        raise
    bad = next((name for name, leaf in {"loss": reference.loss, **reference.grads}.items() if not _finite(leaf)), None)
    if bad is not None:
        what = "the loss" if bad == "loss" else f"the gradient of `{bad}`"
        raise MeshwrightError(
            f"on one device {what} is not finite, so there is nothing to compare with.",
            hint="give a batch for which it is: verify(job, batch=...).",
        )
    return reference


def _cases(
    reference: Reference,
    mesh: Mesh,
    wanted: Sequence[tuple[View, int]],
    tolerance: float,
    *,
    by_name: bool,
    tell: Callable[[str], None],
) -> list[Case]:
    text, setup = mesh_text(mesh), reference.setup
    try:
        placed = place(setup, mesh)
    except Exception as error:
        misfit = isinstance(error, (LayoutError, MeshError)) and not by_name
        return [
            Case(text, view, count, "skipped" if misfit else "failed", message=_told(error)) for view, count in wanted
        ]
    cases = []
    for view, count in wanted:
        problem = _rows_problem(setup, mesh, count)
        if problem:
            cases.append(Case(text, view, count, "failed" if by_name else "skipped", message=problem))
            continue
        tell(f"{text}, {view} view" + (f", {count} minibatches" if count > 1 else ""))
        try:
            cases.append(_case(reference, placed, view, count, tolerance))
        except Exception as error:  # whatever goes wrong on a mesh is the finding
            cause = causes.sees_slices(_other_axes(setup, mesh)) if view == "local" else None
            cases.append(Case(text, view, count, "failed", causes=(cause,) if cause else (), message=_told(error)))
    return cases


def _case(reference: Reference, placed: Placed, view: View, num_minibatches: int, tolerance: float) -> Case:
    setup = reference.setup
    made = {name: worst_copies(leaf, reference.initial[name]) for name, leaf in placed.initial.items()}
    initial = compare("initial parameters", reference.initial, made, tolerance=0.0)
    found = [] if initial.ok else [causes.initial(repeatable=reference.is_repeatable)]
    if not initial.ok:  # so that the rest is compared all the same
        placed = placed.starting_from(reference.params, setup)
    measured = measure(setup, placed, view=view, num_minibatches=num_minibatches)
    comparisons = (initial, *reference.compare(measured, tolerance))
    if not all(comparison.ok for comparison in comparisons[1:]):
        by_name = {comparison.what: comparison for comparison in comparisons}
        found += Finding(reference, placed, measured, by_name, view, num_minibatches, tolerance).causes()
    verdict: Any = "equal" if all(comparison.ok for comparison in comparisons) else "different"
    return Case(mesh_text(placed.mesh), view, num_minibatches, verdict, comparisons, tuple(found))


def _other_axes(setup: SharedInputs, mesh: Mesh) -> list[str]:
    """Returns the axes along which neither rows are split nor parameters gathered: what is done there is the loss's."""
    known = (*setup.row_axes(mesh), *GATHER_AXES)
    return [axis for axis, size in mesh.shape.items() if size > 1 and axis not in known]


def _rows_problem(setup: SharedInputs, mesh: Mesh, num_minibatches: int) -> str:
    ways = math.prod(mesh.shape[axis] for axis in setup.row_axes(mesh))
    rows = count_rows(setup.batch, who="verify")
    if rows % (ways * num_minibatches) == 0:
        return ""
    parts = f" x {num_minibatches} minibatches" if num_minibatches > 1 else ""
    return f"a batch of {rows} rows cannot be split over {ways} devices{parts}."


def _finite(leaf: Any) -> bool:
    return bool(np.isfinite(np.asarray(leaf).astype(np.float64)).all())


def _told(error: Exception) -> str:
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    shown = "\n".join(lines[:8] + ["..."] * (len(lines) > 8))
    return shown if isinstance(error, MeshwrightError) else f"{type(error).__name__}: {shown}"
