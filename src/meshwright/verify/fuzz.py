"""`fuzz` compares a job with one device on random meshes and options, and shrinks the first case that fails."""

from __future__ import annotations

import dataclasses
import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
import optax

from meshwright.errors import MeshwrightError
from meshwright.layout.leaf import text_table
from meshwright.mesh.build import create_mesh
from meshwright.models.execution import Remat
from meshwright.train.job import unused_axes
from meshwright.train.state import require_loss
from meshwright.train.sync import Sync
from meshwright.train.views import View, choose_view
from meshwright.types import PyTree
from meshwright.verify.equivalence import References, compare_mesh
from meshwright.verify.example_batch import drawn_batch
from meshwright.verify.measure import SharedInputs
from meshwright.verify.mesh_choices import all_meshes, make_mesh, pick_devices, rule_axes
from meshwright.verify.random_masks import mask_names, with_random_masks
from meshwright.verify.report import Case

NUM_STEPS = 2
TOLERANCES = {"float32": 1e-5, "mixed": 2e-2, "bfloat16": 2e-2, "fp8": 2**-3}
"""The relative tolerance of each precision: rounding errors of float32 grow to 1e-6, of bfloat16 to 1e-2; rounding a
gradient to e5m2, which has two bits after the first, changes it by up to 2^-3."""

_MOST_SHRINKS = 24
_REMATS: tuple[Remat, ...] = ("none", "none", "dots", "full")
_SYNCS: tuple[Sync | None, ...] = (None, None, "every", "hybrid", "once")


@dataclass(frozen=True)
class FuzzCase:
    """The options of one comparison.

    Args:
        mask: seed of the batch's masks, or None for those of the job.
        seed: seed of the parameters and of the batch.
    """

    mesh: str
    view: View
    num_minibatches: int = 1
    precision: str = "float32"
    remat: Remat = "none"
    sync: Sync | None = None
    mask: int | None = None
    seed: int = 0

    def command(self, job: str) -> str:
        """Returns the command that compares this case.

        Example:
            >>> FuzzCase("dp:2,tp:2", "local", 2, mask=3).command("my_pkg.train:job")
            'meshwright verify my_pkg.train:job --mesh dp:2,tp:2 --view local --minibatches 2 --mask 3 --steps 2'
        """
        words = ["meshwright", "verify", job, "--mesh", self.mesh, "--view", self.view]
        plain = FuzzCase(self.mesh, self.view)
        for name, option in (
            ("num_minibatches", "--minibatches"),
            ("precision", "--precision"),
            ("remat", "--remat"),
            ("sync", "--sync"),
            ("mask", "--mask"),
            ("seed", "--seed"),
        ):
            if getattr(self, name) != getattr(plain, name):
                words += [option, str(getattr(self, name))]
        return shlex.join([*words, "--steps", str(NUM_STEPS)])


@dataclass(frozen=True)
class FuzzReport:
    """The outcome of `fuzz`: each case with its result, and the smallest failing case, if any.

    Args:
        asked: number of cases that were asked for; the time limit may leave fewer.
        job: the name of the job in the command.
    """

    results: tuple[tuple[FuzzCase, Case], ...]
    smallest: tuple[FuzzCase, Case] | None
    asked: int
    seconds: float
    job: str

    @property
    def ok(self) -> bool:
        """Whether no case differs or fails, and at least one is equal."""
        return self.smallest is None and any(case.verdict == "equal" for _, case in self.results)

    def summary(self) -> str:
        """Returns the outcome in one line."""
        counts = Counter("refused" if case.verdict == "skipped" else case.verdict for _, case in self.results)
        shown = ", ".join(f"{counts[verdict]} {verdict}" for verdict in counts)
        limit = (
            f" (time limit; {self.asked} wanted)" if len(self.results) < self.asked and self.smallest is None else ""
        )
        return f"{len(self.results)} cases{limit} in {self.seconds:.0f} s: {shown or 'nothing was compared'}"

    def table(self) -> str:
        """Returns one row per case."""
        names = ("mesh", "view", "num_minibatches", "precision", "remat", "sync", "mask", "seed")
        rows = [(*(_cell(getattr(one, name)) for name in names), case.verdict) for one, case in self.results]
        return text_table(("mesh", "view", "minibatches", *names[3:], "verdict"), rows)

    def require(self) -> None:
        """Raises a `MeshwrightError` with the smallest failing case unless `ok`."""
        if not self.ok:
            raise MeshwrightError(f"fuzzing found a difference.\n{self}")

    def __str__(self) -> str:
        parts = [self.summary()]
        refused = dict.fromkeys(_reason(case.message) for _, case in self.results if case.verdict == "skipped")
        parts += [f"refused: {reason}" for reason in refused]
        if self.smallest is not None:
            one, case = self.smallest
            parts += [f"smallest failing case:\n  {one.command(self.job)}", case.text()]
        return "\n".join(parts)


def sizes_of(mesh: str) -> dict[str, int]:
    """Returns the size of each axis of a mesh string."""
    return {axis: int(size) for axis, _, size in (part.partition(":") for part in mesh.split(","))}


def _reason(message: str) -> str:
    """Returns the first line of a refusal, and the first entry of a list after it."""
    first, *rest = message.splitlines()
    return f"{first} {rest[0].strip()}" if first.endswith(":") and rest else first


def _cell(value: Any) -> str:
    return "-" if value is None else str(value)


def fuzz(
    job: Any,
    num_cases: int,
    *,
    seconds: float | None = None,
    seed: int = 0,
    batch: PyTree = None,
    optimizer: Any = None,
    devices: Sequence[Any] | int | None = None,
    name: str = "JOB",
    progress: Callable[[str], None] | None = None,
) -> FuzzReport:
    """Compares a job with one device on random meshes, views, minibatches, masks, precisions, remat and sync modes.

    Stops at the first case that differs or fails, and shrinks it: it drops options and halves axes as long as the case
    still fails. Cases that the job does not fit are refused, with the reason.

    Args:
        num_cases: number of cases.
        seconds: time limit; no case starts after it (default: none).
        seed: seed of the cases.
        batch, optimizer, devices: as for `verify`.
        name: the name of the job in the printed command.
        progress: called with one line of text before each case.

    Example:
        >>> import jax.numpy as jnp, meshwright as mw
        >>> def loss(params, batch, rng):
        ...     return jnp.mean((batch["x"] @ params["w"] - 1) ** 2), {}
        >>> shape = {"x": jax.ShapeDtypeStruct((16, 8), "float32")}
        >>> job = mw.Job(init=lambda key: {"w": jnp.ones(8)}, rules=[("w", mw.P("fsdp"))], loss=loss, batch=shape)
        >>> fuzz(job, 1, seed=1).ok
        True
    """
    require_loss(job, who="fuzz")
    if num_cases < 1 or (seconds is not None and not seconds > 0):
        raise MeshwrightError(
            f"fuzz needs at least 1 case and more than 0 seconds; got {num_cases=}, {seconds=}.",
            hint="pass e.g. num_cases=20, seconds=600.",
        )
    bench = _Bench(job, batch, optimizer or optax.sgd(0.1), pick_devices(devices))
    log = progress or (lambda line: None)
    began = time.monotonic()
    results: list[tuple[FuzzCase, Case]] = []
    smallest = None
    for number in range(num_cases):
        if seconds is not None and time.monotonic() - began > seconds:
            break
        one = bench.draw(np.random.default_rng([seed, number]))
        log(f"case {number + 1} of {num_cases}: {one.command(name)}")
        case = bench.compare(one)
        results.append((one, case))
        if case.verdict in ("different", "failed"):
            smallest = bench.shrink(one, case, log)
            break
    return FuzzReport(tuple(results), smallest, num_cases, time.monotonic() - began, name)


@dataclass
class _Bench:
    """Draws, compares and shrinks cases; references on one device are kept."""

    job: Any
    batch: PyTree
    optimizer: Any
    devices: list[Any]
    _references: dict[Any, References] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Rules may allow axes that the job does not use, and every mesh with them would be refused.
        axes = rule_axes(self.job.rules)
        self.axes = {axis: needed for axis, needed in axes.items() if needed or not unused_axes(self.job, {axis: 2})}
        sizes = [size for size in range(2, len(self.devices) + 1) if len(self.devices) % size == 0]
        # Most cases use all devices.
        self.meshes = [mesh for size in (*sizes, *[len(self.devices)] * 2) for mesh in all_meshes(size, self.axes)]

    def draw(self, generator: np.random.Generator) -> FuzzCase:
        """Returns a random case."""
        mesh = self.meshes[generator.integers(len(self.meshes))]
        possible = choose_view(self.job, sizes_of(mesh)).view == "local"
        local = possible and generator.random() < 0.6
        view: View = "local" if local else "global"
        mask = int(generator.integers(1, 4)) if generator.random() < 0.5 and self._has_masks() else None
        return FuzzCase(
            mesh,
            view,
            num_minibatches=int(generator.choice([1, 1, 2, 4])),
            precision=str(generator.choice(["float32", "float32", "mixed"])),
            remat=_REMATS[generator.integers(len(_REMATS))],
            sync=_SYNCS[generator.integers(len(_SYNCS))] if local else None,
            mask=mask,
            seed=int(generator.integers(2)),
        )

    def compare(self, one: FuzzCase) -> Case:
        """Compares a case with one device; refusals are skipped cases."""
        tolerance = TOLERANCES[one.precision]
        inputs = self._inputs(one)
        with jax.default_matmul_precision("highest" if one.precision == "float32" else None):
            try:
                references = self._reference(one, inputs)
                references.of(one.num_minibatches)
            except MeshwrightError as error:
                return Case(one.mesh, one.view, one.num_minibatches, "skipped", message=str(error))
            mesh = make_mesh(one.mesh, self.devices)
            wanted = [(one.view, one.num_minibatches)]
            (case,) = compare_mesh(
                inputs, references, mesh, wanted, tolerance, by_name=False, chosen=False, log=lambda line: None
            )
        return dataclasses.replace(case, verdict="skipped") if case.refused else case

    def shrink(self, one: FuzzCase, case: Case, log: Callable[[str], None]) -> tuple[FuzzCase, Case]:
        """Returns the smallest case that still fails, found greedily."""
        log(f"failed ({case.verdict}); shrinking")
        left = _MOST_SHRINKS
        while left:
            for smaller in self._smaller(one):
                left -= 1
                found = self.compare(smaller)
                if found.verdict in ("different", "failed"):
                    one, case = smaller, found
                    break
                if not left:
                    break
            else:
                break
        return one, case

    def _smaller(self, one: FuzzCase) -> Iterator[FuzzCase]:
        plain = FuzzCase(one.mesh, one.view)
        for name in ("mask", "precision", "remat", "sync", "num_minibatches", "seed"):
            if getattr(one, name) != getattr(plain, name):
                yield dataclasses.replace(one, **{name: getattr(plain, name)})
        sizes = sizes_of(one.mesh)
        for axis, size in sizes.items():
            for less in dict.fromkeys((1, size // 2)):
                other = sizes | {axis: less}
                text = ",".join(f"{a}:{n}" for a, n in other.items() if n > 1 or self.axes.get(a, True))
                if 0 < less < size and any(n > 1 for n in other.values()):
                    yield dataclasses.replace(one, mesh=text)

    def _has_masks(self) -> bool:
        return bool(mask_names(self._given(0)))

    def _given(self, seed: int) -> PyTree:
        return drawn_batch(self.job, seed) if self.batch is None else self.batch

    def _inputs(self, one: FuzzCase) -> SharedInputs:
        batch = self._given(one.seed)
        if one.mask is not None:
            batch = with_random_masks(batch, one.mask)
        return SharedInputs(
            self.job, self.optimizer, batch, NUM_STEPS, one.seed, one.precision, one.sync, one.remat, None
        )

    def _reference(self, one: FuzzCase, inputs: SharedInputs) -> References:
        key = (one.precision, one.mask, one.seed)
        if key not in self._references:
            # The single device needs every axis that the rules or a mesh use.
            text = ",".join(f"{axis}:1" for axis in self.axes)
            self._references[key] = References(inputs, create_mesh(text, devices=self.devices[:1]))
        return self._references[key]
