"""Search for the fastest mesh, remat policy, number of minibatches and sync mode of a job on a machine.

The job is profiled once (`profile_job`), so each candidate takes a fraction of a millisecond. `compile_best` compiles
the best candidates and ranks them again.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from meshwright.errors import ConfigError, LayoutError, MeshwrightError
from meshwright.layout import Layout
from meshwright.layout.leaf import format_bytes
from meshwright.mesh.string import MeshSpec, parse_mesh
from meshwright.pages.numbers import plural
from meshwright.parallel.rows import count_rows
from meshwright.plan.compiled.compile import CompileError, compile_step
from meshwright.plan.costs.job_costs import REMATS, JobCosts, profile_job
from meshwright.plan.job_on_mesh import Prepared, lay_out, mesh_sizes, prepare
from meshwright.plan.nearest import Nearest, find_nearest
from meshwright.plan.plan import Plan, assemble, make_plan
from meshwright.plan.possible_meshes import NO_STAGES, known_to_fail, mesh_problem, one_of, pipeline_problem
from meshwright.plan.search_limits import (
    AXES,
    MICROBATCHES,
    MINIBATCHES,
    MOST_STAGES,
    PIPELINES,
    SYNCS,
    Constraints,
    parse_constraints,
)
from meshwright.plan.step_setup import Setup, batch_of
from meshwright.plan.target import Target, parse_target
from meshwright.train.job import unused_axes
from meshwright.train.jobs.job_loading import load_job
from meshwright.train.padding import view_of_layout
from meshwright.train.views import View, ViewChoice, choose_view


@dataclass(frozen=True)
class Rejected:
    """A rejected candidate: a short `reason`, shared by many, and a `detail` for this one; its plan, if it has one."""

    setup: Setup
    reason: str
    detail: str
    plan: Plan | None = None


@dataclass(frozen=True)
class Search:
    """Result of a search: the plans that fit, the fastest first, and the rejected candidates.

    Args:
        nearest: if nothing fits, the candidate that needs the least memory; None if all failed for other reasons.
    """

    target: Target
    ranked: tuple[Plan, ...]
    rejected: tuple[Rejected, ...]
    rows: int
    tokens_per_row: int
    seconds: float
    profile: JobCosts = field(repr=False)
    nearest: Nearest | None = None

    @property
    def considered(self) -> int:
        return len(self.ranked) + len(self.rejected)

    @property
    def batch_words(self) -> str:
        """Rows and tokens of a step."""
        rows, tokens = plural(self.rows, "row"), self.rows * self.tokens_per_row
        return f"{rows} of {self.tokens_per_row} tokens ({tokens / 1e6:.2f}M)" if self.profile.has_tokens else rows

    def reasons(self) -> Counter[str]:
        """Returns the number of rejected candidates by reason."""
        return Counter(item.reason for item in self.rejected)

    def __str__(self) -> str:
        lines = [
            f"{self.target.title}, {self.batch_words} per step",
            f"{self.considered} candidates in {self.seconds:.1f} s; {len(self.ranked)} fit",
        ]
        for place, plan in enumerate(self.ranked[:10], 1):
            assert plan.time is not None
            assert plan.mfu is not None
            memory = format_bytes(plan.memory.total)
            time = f"{plan.time.step.value:8.3f} s within {plan.time.error:.0%}"
            lines.append(f"{place:>3}. {time}  MFU {plan.mfu:5.1%}  {memory:>10}  {plan.setup}")
        lines += [f"  rejected {count}: {reason}" for reason, count in self.reasons().most_common()]
        lines += [] if self.nearest is None else [str(self.nearest)]
        return "\n".join(lines)


def search(
    job: Any,
    target: str | Target,
    *,
    constraints: str | Constraints = "",
    precision: str | Mapping[str, str] = "mixed",
    optimizer: str = "adamw",
    profile: JobCosts | None = None,
    price: float | None = None,
    pad: tuple[str, ...] = (),
) -> Search:
    """Ranks all setups of a job on a target by estimated step time; nothing is compiled.

    Args:
        pad: regexes of parameters whose dims may be padded on meshes that do not divide them.

    Example:
        >>> from meshwright.models import Decoder
        >>> from meshwright.train import language_job
        >>> job = language_job(Decoder.named("7b"), batch_size=256, num_tokens=4096)
        >>> found = search(job, "v5p:4x4x4", constraints="tp<=8, pp=1, remat=full|dots")
        >>> found.considered > 100, found.ranked[0].memory.fits
        (True, True)
    """
    begin = time.perf_counter()
    target = parse_target(target)
    if target.chip is None:
        raise MeshwrightError("cannot rank plans for CPUs, whose speed is unknown.", hint="use e.g. v5p:4x4x8.")
    if isinstance(constraints, str):
        constraints = parse_constraints(constraints)
    _check_possible(target, constraints)
    remats = constraints.choices.get("remat", REMATS)
    if profile is None:
        wanted = tuple(dict.fromkeys(("none", *remats)))
        profile = profile_job(job, precision=precision, optimizer=optimizer, platform=target.platform, remats=wanted)
    rows = _rows(job, profile, constraints, target)
    ranked: list[Plan] = []
    rejected: list[Rejected] = []
    closest: Plan | None = None
    for mesh in _meshes(target, constraints):
        spec = parse_mesh(mesh)
        if constraints.wants_pipelines and mesh_sizes(spec).get("pp", 1) == 1:
            continue
        first = Setup(mesh=mesh, rows=rows, precision=precision, optimizer=optimizer, pad=pad)
        view, layout = _placed(job, profile, target, spec, first)
        here = replace(profile, view=view.view)
        if isinstance(layout, Layout) and not any(leaf.is_padded for leaf in layout.leaves):
            first = replace(first, pad=())
        if view.view == "global" and "sync" in constraints.choices:
            layout = "sync in the global view", f"the step runs in the global view ({view.reason}), without sync modes"
        for setup in _variants(first, constraints, remats, view.view, mesh_sizes(spec)):
            found: Plan | Rejected
            if isinstance(layout, Layout) and (problem := pipeline_problem(here, mesh_sizes(spec), setup)):
                found = Rejected(setup, *problem)
            elif isinstance(layout, Layout):
                found = _judge(Prepared(here, layout, target, spec, setup, view), rows, price)
            else:
                found = Rejected(setup, *layout)
            if isinstance(found, Rejected):
                rejected.append(found)
            elif found.memory.fits is False:
                rejected.append(Rejected(setup, "out of memory", found.memory.verdict, found))
                if closest is None or found.memory.total < closest.memory.total:
                    closest = found
            else:
                ranked.append(found)
    if constraints.wants_pipelines:
        _require_stages(ranked, rejected)
    ranked.sort(key=_rank)
    nearest = None if ranked or closest is None else find_nearest(job, profile, closest, pad=pad)
    seconds = time.perf_counter() - begin
    return Search(target, tuple(ranked), tuple(rejected), rows, profile.tokens_per_row, seconds, profile, nearest)


def compile_best(
    job: Any, found: Search, *, top: int = 3, tell: Any = None, **limits: Any
) -> tuple[tuple[Plan, ...], tuple[Rejected, ...]]:
    """Compiles the best candidates of a search and ranks them again.

    Args:
        job: a job, or a reference to one.
        top: number of candidates to compile.
        tell: called with a line of text before each compilation.
        limits: `timeout_s`, `memory_limit` and `python` of `compile_step`.

    Returns the plans that fit, and the candidates that do not or that failed to compile.

    Example:
        >>> from meshwright.models import Decoder
        >>> from meshwright.train import language_job
        >>> job = language_job(Decoder.named("tiny"), batch_size=8, num_tokens=16)
        >>> found = search(job, "h200:1x2", constraints="fsdp=2, minibatches=1, remat=none")
        >>> plans, failed = compile_best(job, found, python="no-such-python")
        >>> len(plans), failed[0].reason
        (0, 'not compiled: missing')
    """
    known = load_job(job) if isinstance(job, str) else job
    done: list[Plan] = []
    failed: list[Rejected] = []
    for plan in found.ranked[:top]:
        if tell is not None:
            tell(f"compiling {plan.setup} for {found.target}")
        try:
            compiled = compile_step(job, found.target, plan.setup, **limits)
        except CompileError as error:
            failed.append(Rejected(plan.setup, f"not compiled: {error.reason}", str(error)))
            continue
        again = make_plan(known, plan.target, plan.setup, profile=found.profile, compiled=compiled, price=plan.price)
        if again.memory.fits:
            done.append(again)
        else:
            failed.append(Rejected(plan.setup, "out of memory when compiled", again.memory.verdict))
    return tuple(sorted(done, key=_rank)), tuple(failed)


def largest_batch(job: Any, target: str | Target, setup: Setup, *, profile: JobCosts | None = None) -> int:
    """Returns the largest number of rows that fits by estimate, or 0 if none does.

    Example:
        >>> from meshwright.models import Decoder
        >>> from meshwright.train import language_job
        >>> job = language_job(Decoder.named("956m"), batch_size=8, num_tokens=2048)
        >>> setups = [Setup(mesh="fsdp:8", remat=remat) for remat in ("none", "full")]
        >>> none, full = (largest_batch(job, "v5e:2x4", setup) for setup in setups)
        >>> 0 < none < full
        True
    """
    prepared = prepare(job, target, setup, profile=profile)
    unit = prepared.row_parts

    def fits(count: int) -> bool:
        return assemble(prepared, rows=count * unit).memory.fits is not False

    if prepared.target.memory_bytes is None or not fits(1):
        return 0
    low, high = 1, 2
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * unit


def _rows(job: Any, profile: JobCosts, constraints: Constraints, target: Target) -> int:
    """Returns the rows of the batch; a number of tokens is rounded to rows that divide over the devices."""
    if constraints.rows is not None:
        return constraints.rows
    if constraints.batch_tokens is not None:
        if not profile.has_tokens:
            hint = f"write e.g. batch={constraints.batch_tokens} rows."
            raise ConfigError(
                "the job's batch has no `targets` of shape [rows, tokens], so no number of tokens.", hint=hint
            )
        wanted = constraints.batch_tokens / profile.tokens_per_row
        unit = target.num_devices
        while unit > 1 and wanted < unit:
            unit = max(size for size in range(1, unit) if unit % size == 0)
        return max(1, round(wanted / unit)) * unit
    return count_rows(batch_of(job, None), who="search")


def _meshes(target: Target, constraints: Constraints) -> Iterator[str]:
    """Yields all meshes of a target without axes of size 1; only `dp` crosses slices."""
    for sizes in _factors(target.num_devices, len(AXES)):
        named = dict(zip(AXES, sizes, strict=True))
        if named["dp"] % target.num_slices or not all(constraints.allows(axis, size) for axis, size in named.items()):
            continue
        crossing = "" if target.num_slices == 1 else f"@dcn={target.num_slices}"
        parts = [f"{axis}:{size}{crossing if axis == 'dp' else ''}" for axis, size in named.items() if size > 1]
        yield ",".join(parts) or "dp:1"


def _factors(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    if parts == 1:
        yield (number,)
        return
    for first in range(1, number + 1):
        if number % first == 0:
            for rest in _factors(number // first, parts - 1):
                yield (first, *rest)


def _variants(
    first: Setup, constraints: Constraints, remats: Sequence[str], view: View, sizes: Mapping[str, int]
) -> Iterator[Setup]:
    stages, gathers = sizes.get("pp", 1), sizes.get("fsdp", 1) > 1
    schedules = constraints.choices.get("pipeline") if stages > 1 else None
    asked = next((number for sign, number in constraints.limits.get("microbatches", ()) if sign == "="), None)
    if stages > 1 and view == "local" and (schedules or stages <= MOST_STAGES):
        # Every tick gathers the weights of its stage again, unless "once" keeps them.
        syncs = constraints.choices.get("sync", (None, "once") if gathers else (None,))
        # Microbatches accumulate gradients, so minibatches on top of them would only add bubbles.
        for name in schedules or PIPELINES:
            counts = [asked] if asked else [size * stages for size in MICROBATCHES]
            if name == "gpipe":  # the default number is tried below, with minibatches
                counts = [] if asked else counts[1:]
            counts = [count for count in counts if constraints.allows("microbatches", count)]
            if constraints.allows("minibatches", 1):
                for remat, sync, one in itertools.product(remats, syncs, counts):
                    yield replace(first, remat=remat, sync=sync, pipeline=name, num_microbatches=one)
    if schedules and "gpipe" not in schedules:
        return
    if stages > 1 and view == "global" and asked:
        return
    if stages > 1 and view == "local" and not constraints.allows("microbatches", asked or 2 * stages):
        return
    first = replace(first, num_microbatches=asked if stages > 1 else None)
    for remat in remats:
        for count in MINIBATCHES:
            if not constraints.allows("minibatches", count):
                continue
            # In the global view, XLA decides when to exchange gradients.
            for sync in constraints.choices.get("sync", SYNCS) if count > 1 and view == "local" else (None,):
                yield replace(first, remat=remat, num_minibatches=count, sync=sync)


def _require_stages(ranked: Sequence[Plan], rejected: Sequence[Rejected]) -> None:
    """Raises if no candidate has stages to which pipeline options apply."""
    if not ranked and all(one.reason == NO_STAGES for one in rejected):
        raise ConfigError(
            "pipeline or microbatches would have no effect: no candidate is a pipeline.",
            hint="leave it out, or allow pp of 2 or more; only built-in models can be split into pipeline stages.",
        )


def _check_possible(target: Target, constraints: Constraints) -> None:
    """Raises a `ConfigError` if the constraints exclude every candidate."""
    if not any(constraints.allows("minibatches", count) for count in MINIBATCHES):
        raise ConfigError(
            f"{constraints.words('minibatches')} matches none of the numbers of minibatches that a search tries.",
            hint=f"allow {one_of(list(MINIBATCHES))}.",
        )
    if any(True for _ in _meshes(target, constraints)):
        return
    slices = target.num_slices
    limited = [axis for axis in AXES if axis in constraints.limits]
    for axis in limited:
        least = slices if axis == "dp" else 1
        each = target.num_devices // slices
        sizes = [least * size for size in range(1, each + 1) if each % size == 0]
        if not any(constraints.allows(axis, size) for size in sizes):
            raise ConfigError(
                f"{constraints.words(axis)} matches no mesh of {target.num_devices} devices"
                f"{f' in {slices} slices' if slices > 1 else ''}.",
                hint=f"set {axis} to {one_of(sizes)}.",
            )
    words = ", ".join(constraints.words(axis) for axis in limited)
    raise ConfigError(
        f"{words} together match no mesh of {target.num_devices} devices.",
        hint=f"drop one of them: the axis sizes must multiply to {target.num_devices}.",
    )


def _placed(
    job: Any, profile: JobCosts, target: Target, spec: MeshSpec, setup: Setup
) -> tuple[ViewChoice, Layout | tuple[str, str]]:
    """Returns the view and the layout of a job on a mesh, or the reason and detail of its rejection."""
    sizes = mesh_sizes(spec)
    view = choose_view(job, sizes)
    if (problem := mesh_problem(job, profile, sizes, pads=bool(setup.pad))) is not None:
        return view, problem
    if unused := unused_axes(job, sizes):
        return view, ("unused axis", f"the job splits nothing over {unused[0]}")
    try:
        layout, _ = lay_out(job, profile, spec, setup)
        view = view_of_layout(job, layout, None)  # raises if the model cannot run with the padding
    except LayoutError as error:
        first, *leaves = str(error).splitlines()
        return view, ("parameters do not fit", f"{first} {leaves[0].strip()}" if leaves else first)
    crashes = known_to_fail(target, sizes)
    return view, ("known compiler crash", crashes[0]) if crashes else layout


def _judge(prepared: Prepared, rows: int, price: float | None) -> Plan | Rejected:
    setup, parts = prepared.setup, prepared.row_parts
    if rows % parts:
        many = "1 row does" if rows == 1 else f"{rows} rows do"
        return Rejected(setup, "rows not divisible", f"{many} not divide into {parts} parts")
    return assemble(prepared, rows=rows, price=price)


def _rank(plan: Plan) -> tuple[float, int, int]:
    assert plan.time is not None
    # The simpler setup wins a tie.
    return plan.time.step.value, plan.setup.mesh.count(","), plan.setup.num_minibatches
