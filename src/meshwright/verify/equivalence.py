"""`verify`: compares a job's step on meshes with its step on one device."""

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

from meshwright.dtypes import is_float
from meshwright.errors import JobError, LayoutError, MeshError, MeshwrightError
from meshwright.mesh.build import create_mesh
from meshwright.mesh.string import parse_mesh
from meshwright.models.execution import Remat
from meshwright.rules import as_rules
from meshwright.specs import spec_axes
from meshwright.train.gradients import GATHER_AXES, View
from meshwright.train.precision import Precision
from meshwright.train.state import require_loss
from meshwright.train.sync import Sync
from meshwright.types import PyTree
from meshwright.verify import causes
from meshwright.verify.compare import compare
from meshwright.verify.diagnosis import Finding
from meshwright.verify.measure import Placed, Reference, SharedInputs, all_worst_copies
from meshwright.verify.report import Case, VerifyReport

# The order in which meshes list axes: what crosses the slow network first.
AXIS_ORDER = ("dp", "fsdp", "pp", "tp", "sp")


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
    counts = (num_minibatches,) if isinstance(num_minibatches, int) else tuple(num_minibatches)
    if not counts or min(counts) < 1:
        raise MeshwrightError(f"verify got num_minibatches={counts}.", hint="1 or more each; 1 is the whole batch.")
    if not 0 <= seed < 2**32:
        raise MeshwrightError(f"verify got seed={seed}.", hint="a whole number from 0 to 4294967295.")
    inputs = SharedInputs(
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
    wanted = list(itertools.product((views,) if isinstance(views, str) else views, counts))
    chosen = _pick_devices(devices)
    axes = rule_axes(job.rules, data_axes)
    meshes = (getattr(job, "mesh", None) or None) if meshes is None else meshes
    by_name = meshes not in (None, "all")
    if by_name:
        texts = [meshes] if isinstance(meshes, str) else list(meshes or ())
    else:
        texts = (all_meshes if meshes == "all" else each_axis_alone)(len(chosen), axes)
    targets = [_make_mesh(text, chosen) for text in texts]
    # A mesh of one device that has every axis which the rules or another mesh name.
    names = dict.fromkeys([*axes, *(axis for mesh in targets for axis in mesh.axis_names)])
    alone = create_mesh(",".join(f"{axis}:1" for axis in names), devices=chosen[:1])
    tell = progress or (lambda line: None)
    cases: list[Case] = []
    # GPUs and TPUs otherwise round what matmuls take in, and a slice's matmul not as the whole one's.
    with jax.default_matmul_precision("highest" if precision == "float32" else None):
        tell("one device")
        reference = _reference(inputs, alone)
        for mesh in targets:
            cases += _cases(reference, mesh, wanted, tolerance, by_name=by_name, tell=tell)
    return VerifyReport(tuple(cases), tolerance, num_steps, len(reference.initial), inputs.num_rows)


def _reference(inputs: SharedInputs, mesh: Mesh) -> Reference:
    try:
        reference = Reference(inputs.place(mesh, quiet=False))
    except Exception as error:
        error.add_note("This is the step on one device, which a mesh would be compared with.")
        raise
    for name, leaf in {"": reference.loss, **reference.grads}.items():
        if not np.isfinite(leaf.astype(np.float64)).all():
            what = f"the gradient of `{name}`" if name else "the loss"
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
    text, inputs = ",".join(f"{axis}:{size}" for axis, size in mesh.shape.items()), reference.inputs
    try:
        placed = inputs.place(mesh)
    except Exception as error:
        misfit = isinstance(error, (LayoutError, MeshError)) and not by_name
        return [
            Case(text, view, count, "skipped" if misfit else "failed", message=_told(error)) for view, count in wanted
        ]
    cases = []
    for view, count in wanted:
        parts = f", {count} minibatches" if count > 1 else ""
        if inputs.num_rows % (placed.ways * count):
            split = f"{placed.ways} devices{parts.replace(',', ' x')}"
            problem = f"a batch of {inputs.num_rows} rows cannot be split over {split}."
            cases.append(Case(text, view, count, "failed" if by_name else "skipped", message=problem))
            continue
        tell(f"{text}, {view} view{parts}")
        try:
            cases.append(_case(reference, placed, text, view, count, tolerance))
        except Exception as error:  # whatever goes wrong on a mesh is the finding
            # Along axes that neither split rows nor gather parameters, what is done is the loss's.
            used = (*placed.row_axes, *GATHER_AXES)
            others = [axis for axis, size in mesh.shape.items() if size > 1 and axis not in used]
            cause = causes.sees_slices(others) if view == "local" else None
            cases.append(Case(text, view, count, "failed", causes=(cause,) if cause else (), message=_told(error)))
    return cases


def _case(reference: Reference, placed: Placed, mesh: str, view: View, num_minibatches: int, tolerance: float) -> Case:
    made = all_worst_copies(placed.initial, reference.initial)
    initial = compare("initial parameters", reference.initial, made, tolerance=0.0)
    found = [] if initial.ok else [causes.initial(repeatable=reference.is_repeatable)]
    if not initial.ok:  # so that the rest is compared all the same
        placed = placed.starting_from(reference.params)
    measured = placed.measure(view, num_minibatches)
    comparisons = (initial, *reference.compare(measured, tolerance))
    if not all(comparison.ok for comparison in comparisons[1:]):
        by_name = {comparison.what: comparison for comparison in comparisons}
        found += Finding(reference, placed, measured, by_name, view, num_minibatches, tolerance).causes()
    verdict: Any = "equal" if all(comparison.ok for comparison in comparisons) else "different"
    return Case(mesh, view, num_minibatches, verdict, comparisons, tuple(found))


def _told(error: Exception) -> str:
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    shown = "\n".join(lines[:8] + ["..."] * (len(lines) > 8))
    return shown if isinstance(error, MeshwrightError) else f"{type(error).__name__}: {shown}"


# --- What steps are compared on: a batch, and meshes ---


def example_batch(job: Any, *, seed: int = 0) -> PyTree:
    """Returns a batch for a job, the same for the same seed.

    A job may have `make_batch(seed)` or `example_batch(key)`, which say how one is drawn. If not, it is `job.batch`;
    where that has shapes only, floats are drawn from 0 to 1, and whole numbers are 0 or 1, which all vocabularies have.

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
            "the job has no batch to compare steps on.", hint="Job(..., batch=...), or verify(job, batch=...)."
        )
    generator = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: _draw(leaf, generator), batch)


def _draw(leaf: Any, generator: np.random.Generator) -> Any:
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.split(jax.random.key(0), leaf.shape)
    if is_float(leaf.dtype):
        return generator.random(leaf.shape).astype(leaf.dtype)
    return generator.integers(0, 2, leaf.shape).astype(leaf.dtype)


def rule_axes(rules: Any, data_axes: Sequence[str] | None = None) -> dict[str, bool]:
    """Returns the axes that rules know, and those that split data, each with whether every mesh must have it.

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
    """Returns every way to split a number of devices over axes, as mesh strings; axes that may be left out are.

    Example:
        >>> all_meshes(4, {"dp": False, "tp": False})
        ['tp:4', 'dp:2,tp:2', 'dp:4']
    """
    divisors = [size for size in range(1, num_devices + 1) if num_devices % size == 0]
    splits = itertools.product(divisors, repeat=len(axes))
    return [_string(sizes, axes) for sizes in splits if math.prod(sizes) == num_devices]


def each_axis_alone(num_devices: int, axes: dict[str, bool]) -> list[str]:
    """Returns, for each axis, the mesh that has all devices along it."""
    return [_string([num_devices if axis == name else 1 for axis in axes], axes) for name in axes]


def _string(sizes: Sequence[int], axes: dict[str, bool]) -> str:
    named = zip(axes.items(), sizes, strict=True)
    return ",".join(f"{axis}:{size}" for (axis, needed), size in named if size > 1 or needed)


def _make_mesh(text: str, devices: Sequence[Any]) -> Mesh:
    """Returns a mesh of all devices, or of the first ones where its sizes say how many."""
    spec = parse_mesh(text)
    size = math.prod(spec.sizes)
    return create_mesh(spec, devices=devices[:size] if -1 not in spec.sizes and size < len(devices) else devices)


def _pick_devices(devices: Sequence[Any] | int | None) -> list[Any]:
    """Returns the devices to use, of which there must be two at least."""
    available = jax.devices()
    chosen = list(available[:devices] if devices is None or isinstance(devices, int) else devices)
    if isinstance(devices, int) and not 1 <= devices <= len(available):
        raise MeshwrightError(f"devices={devices} of {len(available)} available.", hint=f"use 2 to {len(available)}.")
    if len(chosen) < 2:
        raise MeshwrightError(
            "there is one device only, and nothing to compare it with.",
            hint="simulate some: JAX_PLATFORMS=cpu, and meshwright.simulate_cpu_devices() before JAX starts.",
        )
    return chosen
