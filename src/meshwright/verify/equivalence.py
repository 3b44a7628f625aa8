"""`verify` compares a job's step on meshes with its step on one device."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from meshwright.distributed.same_batch import content_digest, require_same_batch
from meshwright.dtypes import is_float
from meshwright.errors import DataError, JobError, LayoutError, MeshError, MeshwrightError
from meshwright.mesh.build import create_mesh
from meshwright.mesh.string import parse_mesh
from meshwright.models.execution import Remat
from meshwright.rules import as_rules
from meshwright.specs import spec_axes
from meshwright.train.job import check_axes
from meshwright.train.precision import Precision
from meshwright.train.state import require_loss
from meshwright.train.sync import Sync
from meshwright.train.views import View, choose_view
from meshwright.types import PyTree
from meshwright.verify import causes
from meshwright.verify.compare import compare
from meshwright.verify.diagnosis import Finding, cause_of_error
from meshwright.verify.measure import Placed, Reference, SharedInputs, all_worst_copies
from meshwright.verify.report import Case, Verdict, VerifyReport

# Order of the axes in generated meshes: axes that may cross the slow network come first.
AXIS_ORDER = ("dp", "fsdp", "pp", "tp", "sp")


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
    devices: Sequence[Any] | int | None = None,
    progress: Callable[[str], None] | None = None,
) -> VerifyReport:
    """Compares a job's step on meshes with the same step on one device.

    Compares the initial parameters bit for bit, then the loss, every gradient, and the parameters after `num_steps`
    steps. A difference is reported with its likely cause but does not raise; see `VerifyReport.require`.

    Args:
        job: the `meshwright.Job`, with a loss and a batch.
        optimizer: an optax optimizer (default: SGD with learning rate 0.1).
        meshes: a mesh string, a list of them, or "all" for every way to split the devices over `dp` and the axes in the
            rules (default: the job's mesh, or else all devices along each axis in turn). If the job does not fit a
            mesh, the case fails if you named the mesh and is skipped otherwise.
        views: the views to compare (default: the global view, and the local view if `choose_view` chooses it for a
            mesh).
        num_minibatches: numbers of minibatches to compare; the single device always computes the whole batch at once.
        num_steps: number of steps to take.
        tolerance: the largest allowed error, relative to a leaf's largest gradient or change. Parameters are allowed
            10 times as much if `num_steps` is more than 1, because rounding errors grow.
        batch: the batch (default: the job's; see `example_batch`).
        seed: seed of the parameters and of a generated batch.
        precision: precision of the step. With "float32", matmuls use `jax.default_matmul_precision("highest")`.
        sync, remat, data_axes: as for `make_train_step`.
        devices: devices to use, or their number (default: all).
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
    batch = _drawn_batch(job, seed) if batch is None else batch
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
    )
    each = ("global", "local") if views is None else (views,) if isinstance(views, str) else views
    wanted = list(itertools.product(each, counts))
    chosen = _pick_devices(devices)
    axes = rule_axes(job.rules, data_axes)
    meshes = (getattr(job, "mesh", None) or None) if meshes is None else meshes
    by_name = meshes not in (None, "all")
    if by_name:
        texts = [meshes] if isinstance(meshes, str) else list(meshes or ())
    else:
        texts = (all_meshes if meshes == "all" else each_axis_alone)(len(chosen), axes)
    targets = [_make_mesh(text, chosen) for text in texts]
    # The single device needs every axis that the rules or a mesh use.
    names = dict.fromkeys([*axes, *(axis for mesh in targets for axis in mesh.axis_names)])
    alone = create_mesh(",".join(f"{axis}:1" for axis in names), devices=chosen[:1])
    log = progress or (lambda line: None)
    cases: list[Case] = []
    # GPUs and TPUs otherwise round the inputs of matmuls, differently for a shard than for the whole array.
    with jax.default_matmul_precision("highest" if precision == "float32" else None):
        log("one device")
        reference = _reference(inputs, alone)
        for mesh in targets:
            cases += _cases(reference, mesh, wanted, tolerance, by_name=by_name, chosen=views is None, log=log)
    return VerifyReport(tuple(cases), tolerance, num_steps, len(reference.initial), inputs.num_rows)


def _reference(inputs: SharedInputs, mesh: Mesh) -> Reference:
    try:
        reference = Reference(inputs.place(mesh, quiet=False))
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
    return reference


def _cases(
    reference: Reference,
    mesh: Mesh,
    wanted: Sequence[tuple[View, int]],
    tolerance: float,
    *,
    by_name: bool,
    chosen: bool,
    log: Callable[[str], None],
) -> list[Case]:
    text, inputs = ",".join(f"{axis}:{size}" for axis, size in mesh.shape.items()), reference.inputs
    try:
        check_axes(inputs.job, mesh.shape, data_axes=inputs.data_axes)
        placed = inputs.place(mesh)
    except Exception as error:
        misfit = isinstance(error, (LayoutError, MeshError)) and not by_name
        verdict: Verdict = "skipped" if misfit else "failed"
        return [Case(text, view, count, verdict, message=_error_text(error)) for view, count in wanted]
    cases = []
    choice = choose_view(inputs.job, mesh, data_axes=placed.row_axes)
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
            cases.append(_case(reference, placed, text, view, count, tolerance))
        except Exception as error:  # an error on a mesh is a finding
            cause = cause_of_error(error, placed, view, count)
            found = (cause,) if cause else ()
            cases.append(Case(text, view, count, "failed", causes=found, message=_error_text(error)))
    return cases


def _case(reference: Reference, placed: Placed, mesh: str, view: View, num_minibatches: int, tolerance: float) -> Case:
    made = all_worst_copies(placed.initial, reference.initial)
    initial = compare("initial parameters", reference.initial, made, tolerance=0.0)
    found = [] if initial.ok else [causes.initial(repeatable=reference.is_repeatable)]
    if not initial.ok:  # start from the same parameters, so that the step itself can still be compared
        placed = placed.starting_from(reference.params)
    measured = placed.measure(placed.make_step(view, num_minibatches))
    comparisons = (initial, *reference.compare(measured, tolerance))
    if not all(comparison.ok for comparison in comparisons[1:]):
        by_name = {comparison.what: comparison for comparison in comparisons}
        found += Finding(reference, placed, measured, by_name, view, num_minibatches, tolerance).causes()
    verdict: Verdict = "equal" if all(comparison.ok for comparison in comparisons) else "different"
    return Case(mesh, view, num_minibatches, verdict, comparisons, tuple(found))


def _error_text(error: Exception) -> str:
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    shown = "\n".join(lines[:8] + ["..."] * (len(lines) > 8))
    return shown if isinstance(error, MeshwrightError) else f"{type(error).__name__}: {shown or 'without a message'}"


# --- The batch and the meshes ---


def example_batch(job: Any, *, seed: int = 0) -> PyTree:
    """Returns a batch for a job, the same for the same seed.

    Calls the job's `make_batch(seed)` or `example_batch(key)` if it has one, and returns `job.batch` otherwise. For
    shapes in `job.batch`, floats are drawn from 0 to 1, and integers are 0 or 1, which are in every vocabulary.

    Example:
        >>> import meshwright as mw
        >>> job = mw.Job(init=None, rules=[], batch={"x": jax.ShapeDtypeStruct((4,), "int32")})
        >>> example_batch(job)["x"].tolist()
        [1, 1, 1, 0]
    """
    if getattr(job, "make_batch", None) is not None:
        return job.make_batch(seed)
    if getattr(job, "example_batch", None) is not None:
        return job.example_batch(jax.random.key(seed))
    batch = getattr(job, "batch", None)
    if batch is None:
        raise JobError(
            "the job has no batch to compare steps on.", hint="use Job(..., batch=...) or verify(job, batch=...)."
        )
    generator = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: _draw(leaf, generator), batch)


def _drawn_batch(job: Any, seed: int) -> PyTree:
    """Returns the job's batch; raises if the job draws another one if asked again, as another host would."""
    batch = example_batch(job, seed=seed)
    if content_digest(batch) != content_digest(example_batch(job, seed=seed)):
        name = "make_batch" if getattr(job, "make_batch", None) is not None else "example_batch"
        raise DataError(
            f"`{name}` returns another batch each time, so every host would train on its own.",
            hint="draw the batch from the seed alone: np.random.default_rng(seed), not np.random or the time.",
        )
    return batch


def _draw(leaf: Any, generator: np.random.Generator) -> Any:
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.split(jax.random.key(0), leaf.shape)
    if is_float(leaf.dtype):
        return generator.random(leaf.shape).astype(leaf.dtype)
    return generator.integers(0, 2, leaf.shape).astype(leaf.dtype)


def rule_axes(rules: Any, data_axes: Sequence[str] | None = None) -> dict[str, bool]:
    """Returns the axes of the rules and the data axes (default: `dp`), each with whether every mesh must have it.

    Example:
        >>> from meshwright import P, Rules
        >>> rule_axes(Rules([("w", P("fsdp", "tp"))], optional_axes=("tp",)))
        {'dp': False, 'fsdp': True, 'tp': False}
    """
    rules = as_rules(rules)
    named = dict.fromkeys(axis for _, spec in rules for axis in spec_axes(spec))
    axes = [*(data_axes or ("dp",)), *rules.optional_axes, *named]
    order = {axis: place for place, axis in enumerate(AXIS_ORDER)}
    ordered = sorted(dict.fromkeys(axes), key=lambda axis: order.get(axis, len(order)))
    return {axis: axis in named and axis not in rules.optional_axes for axis in ordered}


def all_meshes(num_devices: int, axes: dict[str, bool]) -> list[str]:
    """Returns every way to split devices over axes, as mesh strings without optional axes of size 1.

    Example:
        >>> all_meshes(4, {"dp": False, "tp": False})
        ['tp:4', 'dp:2,tp:2', 'dp:4']
    """
    divisors = [size for size in range(1, num_devices + 1) if num_devices % size == 0]
    splits = itertools.product(divisors, repeat=len(axes))
    return [_string(sizes, axes) for sizes in splits if math.prod(sizes) == num_devices]


def each_axis_alone(num_devices: int, axes: dict[str, bool]) -> list[str]:
    """Returns a mesh string for each axis, with all devices along that axis."""
    return [_string([num_devices if axis == name else 1 for axis in axes], axes) for name in axes]


def _string(sizes: Sequence[int], axes: dict[str, bool]) -> str:
    named = zip(axes.items(), sizes, strict=True)
    return ",".join(f"{axis}:{size}" for (axis, needed), size in named if size > 1 or needed)


def _make_mesh(text: str, devices: Sequence[Any]) -> Mesh:
    """Returns the mesh on all devices, or on the first ones if it needs fewer."""
    spec = parse_mesh(text)
    size = math.prod(spec.sizes)
    return create_mesh(spec, devices=devices[:size] if -1 not in spec.sizes and size < len(devices) else devices)


def _pick_devices(devices: Sequence[Any] | int | None) -> list[Any]:
    """Returns the devices to use; raises if there are fewer than 2."""
    available = jax.devices()
    chosen = list(available[:devices] if devices is None or isinstance(devices, int) else devices)
    if isinstance(devices, int) and not 1 <= devices <= len(available):
        count = len(available)
        raise MeshwrightError(f"devices={devices}, but {count} are available.", hint=f"pass 2 to {count}.")
    if len(chosen) < 2:
        raise MeshwrightError(
            "verify needs at least 2 devices, but there is only one.",
            hint="set JAX_PLATFORMS=cpu and call meshwright.simulate_cpu_devices() before JAX starts.",
        )
    return chosen
