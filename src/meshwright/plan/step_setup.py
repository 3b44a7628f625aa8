"""The options of a training step that a plan varies, as plain data."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from meshwright.errors import JobError, MeshwrightError, did_you_mean
from meshwright.mesh.current import AnyMesh
from meshwright.parallel.rows import count_rows
from meshwright.train.jobs.language_job import with_execution
from meshwright.train.optimizer.muon import muon
from meshwright.train.precision import Precision
from meshwright.train.state import require_loss, state_layout
from meshwright.train.step import Step, make_train_step
from meshwright.train.step_options import xla_options
from meshwright.train.views import ViewChoice, resolve_view, sync_needs_local_view
from meshwright.types import PyTree

LEARNING_RATE = 1e-4  # has no effect on a plan


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The options of a training step.

    Args:
        mesh: a mesh string with explicit sizes.
        rows: rows of the global batch (default: those of the job's example batch).
        view: "local" or "global" (default: chosen by `choose_view`, as in `make_train_step`).
        remat, num_minibatches, sync, clip: arguments of `make_train_step`.
        precision: "float32", "mixed", "bfloat16", "fp8", or the `Precision` fields that differ from the defaults.
        optimizer: name of an optax optimizer.
        zero_axis: argument of `state_layout`.
        pipeline: name of a pipeline schedule (default: the job's); see `meshwright.parallel.make_schedule`.
        pipeline_rounds: stages per device with "circular" or "interleaved-1f1b" (default: the job's, or 2).
        num_microbatches: number of microbatches in a pipeline (default: the job's, or twice the number of stages).
        pad: regexes of parameters whose dims may be padded if the mesh does not divide them.
        overlap: sets the compiler options that overlap collectives with compute on the target (`overlap_options`).
        compiler_options: further XLA options.

    Example:
        >>> str(Setup(mesh="fsdp:8", remat="full"))
        'fsdp:8 remat=full'
    """

    mesh: str
    rows: int | None = None
    view: str | None = None
    remat: str = "none"
    num_minibatches: int = 1
    sync: str | None = None
    precision: str | Mapping[str, Any] = "mixed"
    optimizer: str = "adamw"
    zero_axis: str | None = None
    pipeline: str | None = None
    pipeline_rounds: int | None = None
    num_microbatches: int | None = None
    pad: tuple[str, ...] = ()
    clip: float | None = 1.0
    overlap: bool = True
    compiler_options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def dtypes(self) -> Precision:
        """The precision as `make_train_step` takes it."""
        return Precision.named(self.precision) if isinstance(self.precision, str) else Precision(**self.precision)

    @property
    def asks_for_stages(self) -> bool:
        """Whether an option is set that only a pipeline has."""
        return any(asked is not None for asked in (self.pipeline, self.pipeline_rounds, self.num_microbatches))

    def precision_options(self) -> dict[str, str]:
        """Returns the precision as command-line options; {} if no options give it.

        Example:
            >>> Setup(mesh="dp:8", precision={"compute": "bfloat16", "fp8": {"scaling": "current"}}).precision_options()
            {'--precision': 'fp8', '--fp8-scaling': 'current'}
        """
        if isinstance(self.precision, str):
            return {"--precision": self.precision}
        fields = self.precision.get("fp8")
        if not isinstance(fields, Mapping) or dict(self.precision) != {"compute": "bfloat16", "fp8": fields}:
            return {}
        return {"--precision": "fp8"} | {f"--fp8-{name.replace('_', '-')}": str(fields[name]) for name in fields}

    def to_json(self) -> dict[str, Any]:
        """Returns the mesh and the fields that differ from their defaults."""
        empty = Setup(mesh="")
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        changed = {name: value for name, value in values.items() if name == "mesh" or value != getattr(empty, name)}
        kinds: list[tuple[Any, Any]] = [(Mapping, dict), (tuple, list)]
        return {
            name: next((plain(value) for kind, plain in kinds if isinstance(value, kind)), value)
            for name, value in changed.items()
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Setup:
        """Returns the setup that `to_json` wrote.

        Example:
            >>> setup = Setup(mesh="fsdp:8", remat="full", rows=16)
            >>> setup.to_json(), Setup.from_json(setup.to_json()) == setup
            ({'mesh': 'fsdp:8', 'rows': 16, 'remat': 'full'}, True)
        """
        known = [field.name for field in dataclasses.fields(cls)]
        for name in data:
            if name not in known:
                raise MeshwrightError(f"a setup has no field {name!r}.", hint=did_you_mean(name, known))
        return cls(**{**data, **({"pad": tuple(data["pad"])} if "pad" in data else {})})

    def __str__(self) -> str:
        shown = {name: value for name, value in self.to_json().items() if name != "mesh"}
        return " ".join([self.mesh, *(f"{name}={plain(value)}" for name, value in shown.items())])


def plain(value: Any) -> str:
    """Returns the value of an option as a command line has it.

    >>> plain(["layers/", "head"]), plain({"xla_a": True}), plain(2)
    ('layers/,head', 'xla_a=True', '2')
    """
    if isinstance(value, Mapping):
        return ",".join(f"{name}={one}" for name, one in value.items())
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def named_optimizer(name: str, job: Any = None) -> Any:
    """Returns an optax optimizer by name, with a placeholder learning rate; a job may say what muon orthogonalizes.

    Example:
        >>> named_optimizer("adamw").init({"w": np.zeros(2)})[0].mu
        {'w': Array([0., 0.], dtype=float32)}
    """
    import optax

    own_muon = functools.partial(muon, is_matrix=getattr(job, "is_matrix", None))
    factory: Any = own_muon if name == "muon" else getattr(optax, name, None)
    made = None
    with contextlib.suppress(Exception):  # other functions of optax make no optimizer of a rate
        made = factory(LEARNING_RATE)
    if not isinstance(made, optax.GradientTransformation):
        known = ("adamw", "adam", "sgd", "adafactor", "lion", "lamb", "rmsprop", "adagrad", "muon")
        raise MeshwrightError(
            f"optax has no optimizer {name!r}.", hint=did_you_mean(name, known) or f"use e.g. {', '.join(known)}."
        )
    return made


def batch_of(job: Any, rows: int | None) -> PyTree:
    """Returns the shapes of a job's example batch, resized to `rows` if given."""
    if getattr(job, "batch", None) is None:
        raise JobError(
            "the job has no example batch, which a plan needs.", hint="pass its shapes: Job(..., batch=...)."
        )
    have = count_rows(job.batch, who="plan")

    def shape(leaf: Any) -> Any:
        dims = np.shape(leaf)
        if dims and rows is not None:
            assert dims[0] == have
            dims = (rows, *dims[1:])
        return jax.ShapeDtypeStruct(dims, leaf.dtype)

    return jax.tree.map(shape, job.batch)


def build_step(job: Any, mesh: AnyMesh, setup: Setup) -> tuple[Step, PyTree]:
    """Returns the train step of a setup on a mesh, and the shapes of its batch."""
    require_loss(job, who="plan")
    job = with_schedule(job, setup)
    optimizer = named_optimizer(setup.optimizer, job)
    layout = state_layout(
        job, optimizer, mesh, zero_axis=setup.zero_axis, precision=setup.dtypes, pad=setup.pad or False
    )
    step = make_train_step(
        job,
        optimizer,
        layout,
        view=setup.view,  # type: ignore[arg-type]
        num_minibatches=setup.num_minibatches,
        sync=setup.sync,  # type: ignore[arg-type]
        precision=setup.dtypes,
        remat=setup.remat,  # type: ignore[arg-type]
        clip=setup.clip,
        overlap=setup.overlap,
        compiler_options=dict(setup.compiler_options) or None,
    )
    return step, batch_of(job, setup.rows)


def with_schedule(job: Any, setup: Setup) -> Any:
    """Returns the job with the pipeline schedule of a setup; raises if it is not a language job of Meshwright's."""
    names = ("pipeline", "pipeline_rounds", "num_microbatches")
    changes: dict[str, Any] = {name: value for name in names if (value := getattr(setup, name)) is not None}
    if not changes:
        return job
    return with_execution(job, **changes)


def view_of_setup(job: Any, sizes: Mapping[str, int], setup: Setup) -> ViewChoice:
    """Returns the view of a setup's step; raises if the job cannot run in a view that the setup forces.

    Example:
        >>> import meshwright as mw
        >>> job = mw.Job(init=lambda key: {}, rules=[])
        >>> view_of_setup(job, {"dp": 4, "tp": 2}, Setup(mesh="dp:4,tp:2")).view
        'global'
    """
    choice = resolve_view(job, sizes, setup.view)  # type: ignore[arg-type]
    if choice.view == "global" and setup.sync is not None:
        raise sync_needs_local_view(setup.sync, choice)
    return choice


def step_options(mesh: AnyMesh, setup: Setup, view: str) -> dict[str, Any]:
    """Returns the XLA options of a setup's step."""
    overlap = setup.overlap and view == "local"
    is_fp8 = setup.dtypes.fp8 is not None
    return xla_options(mesh, dict(setup.compiler_options), overlap=overlap, fp8=is_fp8) or {}
