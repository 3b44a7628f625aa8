"""`verify` compares a job's step on meshes with its step on one device."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from meshwright.distributed.same_batch import require_same_batch
from meshwright.errors import JobError, LayoutError, MeshError, MeshwrightError
from meshwright.layout.report import PadPolicy
from meshwright.mesh.build import create_mesh
from meshwright.models.execution import Remat
from meshwright.train.job import check_axes
from meshwright.train.padding import view_of_layout
from meshwright.train.precision import Precision
from meshwright.train.state import require_loss
from meshwright.train.sync import Sync
from meshwright.train.views import View
from meshwright.types import PyTree
from meshwright.verify.blind_spots import blind_spots, require_gradients
from meshwright.verify.compare import compare
from meshwright.verify.diagnose import causes
from meshwright.verify.diagnose.compile_notes import compile_with_notes
from meshwright.verify.diagnose.diagnosis import LOSS_VARIES, Finding, cause_of_error
from meshwright.verify.example_batch import drawn_batch
from meshwright.verify.measure import Placed, SharedInputs
from meshwright.verify.mesh_choices import all_meshes, each_axis_alone, make_mesh, pick_devices, rule_axes
from meshwright.verify.reference import Reference, all_worst_copies
from meshwright.verify.report import Case, Verdict, VerifyReport


def verify(
    job: Any,
    *,
    optimizer: Any = None,
    meshes: str | Sequence[str] | None = None,
    views: View | Sequence[View] | None = None,
    num_minibatches: int | Sequence[int] = (1,),
    num_steps: int = 3,
    tolerance: float = 1e-5,
    batch: PyTree = None,
    seed: int = 0,
    precision: Precision | str = "float32",
    sync: Sync | None = None,
    remat: Remat = "none",
    data_axes: tuple[str, ...] | None = None,
    pad: PadPolicy = False,
    devices: Sequence[Any] | int | None = None,
    inspect: bool = False,
    progress: Callable[[str], None] | None = None,
) -> VerifyReport:
    """Compares a job's step on meshes with the same step on one device.

    Compares the initial parameters bit for bit, then the loss, every gradient and the job's metrics in the first step,
    and the parameters and the model state after `num_steps` steps. A difference is reported with its likely cause but
    does not raise; see `VerifyReport.require`.

    Args:
        job: the `meshwright.Job`, with a loss and a batch.
        optimizer: an optax optimizer (default: SGD with learning rate 0.1).
        meshes: a mesh string, a list of them, or "all" for every way to split the devices over `dp` and the axes in the
            rules (default: the job's mesh, or else all devices along each axis in turn). If the job does not fit a
            mesh, the case fails if you named the mesh and is skipped otherwise.
        views: the views to compare (default: the global view, and the local view if `choose_view` chooses it for a
            mesh).
        num_minibatches: numbers of minibatches to compare; the single device computes the whole batch at once, unless
            the job has a model state, whose statistics depend on the rows of a minibatch.
        num_steps: number of steps to take.
        tolerance: the largest allowed error, relative to a leaf's largest gradient or change. Parameters are allowed
            10 times as much if `num_steps` is more than 1, because rounding errors grow.
        batch: the batch (default: the job's; see `example_batch`).
        seed: seed of the parameters and of a generated batch.
        precision: precision of the step. With "float32", matmuls use `jax.default_matmul_precision("highest")`.
        sync, remat, data_axes: as for `make_train_step`.
        pad: the leaves that may be padded on a mesh, as for `state_layout`; they are compared without padding.
        devices: devices to use, or their number (default: all).
        inspect: whether to read XLA's warnings and the compiled program in the global view, for notes about arrays that
            it replicates or gathers.
        progress: called with one line of text before each case.

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
    if not 0 <= seed < 2**32:
        raise MeshwrightError(f"seed must be from 0 to 4294967295; got {seed}.", hint="pass e.g. seed=0.")
    batch = drawn_batch(job, seed) if batch is None else batch
    require_same_batch(batch, who="verify")
    if jax.process_count() > 1:
        raise MeshwrightError(
            f"verify needs a single process, but there are {jax.process_count()}.",
            hint="run it on one host, or on simulated CPU devices.",
        )
    if not tolerance > 0 or num_steps < 1:
        raise MeshwrightError(
            f"tolerance must be above 0 and num_steps at least 1; got {tolerance=}, {num_steps=}.",
            hint="pass e.g. tolerance=1e-5, num_steps=3.",
        )
    counts = (num_minibatches,) if isinstance(num_minibatches, int) else tuple(num_minibatches)
    if not counts or min(counts) < 1:
        raise MeshwrightError(
            f"num_minibatches must be at least 1; got {counts}.", hint="pass 1 to compute the whole batch at once."
        )
    inputs = SharedInputs(
        job,
        optimizer or optax.sgd(0.1),
        batch,
        num_steps,
        seed,
        precision,
        sync,
        remat,
        data_axes,
        pad,
    )
    each = ("global", "local") if views is None else (views,) if isinstance(views, str) else views
    wanted = list(itertools.product(each, counts))
    chosen = pick_devices(devices)
    axes = rule_axes(job.rules, data_axes)
    meshes = (getattr(job, "mesh", None) or None) if meshes is None else meshes
    by_name = meshes not in (None, "all")
    if by_name:
        texts = [meshes] if isinstance(meshes, str) else list(meshes or ())
    else:
        texts = (all_meshes if meshes == "all" else each_axis_alone)(len(chosen), axes)
    targets = [make_mesh(text, chosen) for text in texts]
    # The single device needs every axis that the rules or a mesh use.
    names = dict.fromkeys([*axes, *(axis for mesh in targets for axis in mesh.axis_names)])
    alone = create_mesh(",".join(f"{axis}:1" for axis in names), devices=chosen[:1])
    log = progress or (lambda line: None)
    cases: list[Case] = []
    # GPUs and TPUs otherwise round the inputs of matmuls, differently for a shard than for the whole array.
    with jax.default_matmul_precision("highest" if precision == "float32" else None):
        log("one device")
        references = References(inputs, alone)
        reference = references.of(counts[0])
        notes = blind_spots(batch, reference.grads, reference.changes(reference.last))
        for mesh in targets:
            cases += compare_mesh(
                inputs,
                references,
                mesh,
                wanted,
                tolerance,
                by_name=by_name,
                chosen=views is None,
                inspect=inspect,
                log=log,
            )
    return VerifyReport(tuple(cases), tolerance, num_steps, len(reference.initial), inputs.num_rows, notes)


class References:
    """The step on one device, for any number of minibatches.

    Without a model state, accumulated gradients are those of the whole batch, so all numbers share one reference.
    """

    def __init__(self, inputs: SharedInputs, mesh: Mesh) -> None:
        self.inputs, self.mesh = dataclasses.replace(inputs, sync=None, remat="none"), mesh
        self._known: dict[int, Reference] = {}

    def of(self, num_minibatches: int) -> Reference:
        count = num_minibatches if self.inputs.keeps_state else 1
        if count not in self._known:
            self._known[count] = _reference(self.inputs, self.mesh, count)
        return self._known[count]


def _reference(inputs: SharedInputs, mesh: Mesh, num_minibatches: int) -> Reference:
    try:
        reference = Reference(inputs.place(mesh, quiet=False), num_minibatches)
    except Exception as error:
        error.add_note("This error comes from the step on one device, before any mesh was compared.")
        raise
    for name, leaf in {"": reference.loss, **reference.grads}.items():
        if not np.isfinite(leaf.astype(np.float64)).all():
            what = f"the gradient of `{name}`" if name else "the loss"
            raise MeshwrightError(
                f"{what} is not finite on one device, so there is no reference to compare with.",
                hint="pass a batch with a finite loss and finite gradients: verify(job, batch=...).",
            )
    require_gradients(reference.grads)
    return reference


def compare_mesh(
    inputs: SharedInputs,
    references: References,
    mesh: Mesh,
    wanted: Sequence[tuple[View, int]],
    tolerance: float,
    *,
    by_name: bool,
    chosen: bool,
    log: Callable[[str], None],
    inspect: bool = False,
) -> list[Case]:
    """Compares a mesh in all wanted views and numbers of minibatches; a mesh that you named must fit (`by_name`)."""
    text = ",".join(f"{axis}:{size}" for axis, size in mesh.shape.items())
    try:
        check_axes(inputs.job, mesh.shape, data_axes=inputs.data_axes)
        placed = inputs.place(mesh)
        choice = view_of_layout(inputs.job, placed.layout, None, data_axes=placed.row_axes)
    except Exception as error:
        misfit = isinstance(error, (LayoutError, MeshError)) and not by_name
        verdict: Verdict = "skipped" if misfit else "failed"
        said: dict[str, Any] = {"message": _error_text(error), "refused": _is_refusal(error)}
        return [Case(text, view, count, verdict, **said) for view, count in wanted]
    cases = []
    for view, count in wanted:
        if chosen and view == "local" and choice.view == "global":
            cases.append(Case(text, view, count, "skipped", message=f"the local view: {choice.reason}."))
            continue
        parts = f", {count} minibatches" if count > 1 else ""
        if inputs.num_rows % (placed.ways * count):
            split = f"{placed.ways} devices{parts.replace(',', ' x')}"
            problem = f"a batch of {inputs.num_rows} rows cannot be split over {split}."
            cases.append(Case(text, view, count, "failed" if by_name else "skipped", message=problem))
            continue
        log(f"{text}, {view} view{parts}")
        try:
            cases.append(_case(references.of(count), placed, text, view, count, tolerance, inspect))
        except Exception as error:  # an error on a mesh is a finding
            cause = cause_of_error(error, placed, view, count)
            found = (cause,) if cause else ()
            said = {"message": _error_text(error), "refused": _is_refusal(error)}
            cases.append(Case(text, view, count, "failed", causes=found, **said))
    return cases


def _case(
    reference: Reference,
    placed: Placed,
    mesh: str,
    view: View,
    num_minibatches: int,
    tolerance: float,
    inspect: bool,
) -> Case:
    made = all_worst_copies(placed.initial, reference.initial)
    initial = compare("initial parameters", reference.initial, made, tolerance=0.0)
    found = [] if initial.ok else [causes.initial(repeatable=reference.is_repeatable)]
    if not initial.ok:  # start from the same parameters, so that the step itself can still be compared
        placed = placed.starting_from(reference.params)
    step: Callable[..., Any] = placed.make_step(view, num_minibatches)
    notes: tuple[str, ...] = ()
    if inspect and view == "global":
        step, notes = compile_with_notes(step, placed.inputs.batch, placed.mesh.shape)
    measured = placed.measure(step)
    comparisons = (initial, *reference.compare(measured, tolerance))
    if not all(comparison.ok for comparison in comparisons[1:]):
        by_name = {comparison.what: comparison for comparison in comparisons}
        found += Finding(reference, placed, measured, by_name, view, num_minibatches, tolerance).causes()
    verdict: Verdict = "equal" if all(comparison.ok for comparison in comparisons) else "different"
    return Case(mesh, view, num_minibatches, verdict, comparisons, tuple(found), notes=notes)


def _is_refusal(error: Exception) -> bool:
    """Whether an error says that the job cannot run on a mesh; an error in the job's own code is a finding."""
    return isinstance(error, MeshwrightError) and not isinstance(error, JobError) and LOSS_VARIES not in str(error)


def _error_text(error: Exception) -> str:
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    shown = "\n".join(lines[:8] + ["..."] * (len(lines) > 8))
    return shown if isinstance(error, MeshwrightError) else f"{type(error).__name__}: {shown or 'without a message'}"
