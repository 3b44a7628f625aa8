"""Assertions on a plan, for tests: limits on memory, communication and time."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

from meshwright.errors import MeshwrightError, MeshwrightWarning
from meshwright.layout.leaf import format_bytes
from meshwright.plan.compiled.compile import WIDENED, Compiled, compile_step
from meshwright.plan.compiled.verdict import CompiledCollective
from meshwright.plan.costs.job_costs import JobCosts
from meshwright.plan.plan import Plan, make_plan
from meshwright.plan.step_setup import Setup
from meshwright.plan.target import parse_target
from meshwright.train.jobs.job_loading import load_job


class PlanError(MeshwrightError, AssertionError):
    """A plan exceeds its limits; `problems` has a line for each, `plan` is the plan."""

    def __init__(self, message: str, *, plan: Plan, problems: tuple[str, ...]) -> None:
        self.plan, self.problems = plan, problems
        super().__init__(message)


def assert_plan(
    job: Any,
    target: str,
    *,
    setup: Setup | None = None,
    mesh: str | None = None,
    rows: int | None = None,
    max_bytes: float | None = None,
    max_wire_bytes: float | None = None,
    exposed: int | None = None,
    ignore_bytes: float = 2**20,
    max_seconds: float | None = None,
    min_mfu: float | None = None,
    compile: bool | Compiled = False,
    profile: JobCosts | None = None,
    **limits: Any,
) -> Plan:
    """Plans a job and raises a `PlanError` if it does not fit the machine or exceeds a limit; returns the plan.

    By default all figures are computed, which takes a second or two. With `compile=True` the step is compiled for the
    target, and memory and communication are read from the program; this needs the target's compiler, except for CPUs.
    Programs for CPUs send 16-bit values as float32; a warning says so if `max_wire_bytes` is checked against one.

    Args:
        job: a job, or a reference to one (`module:attribute`).
        setup: the setup to plan; or pass only `mesh` and `rows`, with the defaults of `Setup` for the rest.
        max_bytes: limit on the peak memory per device.
        max_wire_bytes: limit on the bytes that each device sends per step.
        exposed: number of collectives that may send more than `ignore_bytes` exposed bytes per step. On TPUs and GPUs
            the overlap is estimated from assumed rates.
        max_seconds, min_mfu: limits on the step time and MFU; both are assumed, and unknown for CPUs.
        compile: whether to compile, or the result of an earlier `compile_step`.
        limits: `timeout_s`, `memory_limit` and `python` of `compile_step`.

    Example:
        >>> from meshwright.models import Decoder
        >>> from meshwright.train import language_job
        >>> job = language_job(Decoder.named("tiny"), batch_size=8, num_tokens=16)
        >>> plan = assert_plan(job, "v5p:2x2x1", mesh="fsdp:4", max_bytes=64 * 2**20)
        >>> plan.memory.fits
        True
    """
    if (setup is None) == (mesh is None):
        found = "neither setup nor mesh" if setup is None else "both setup and mesh"
        raise MeshwrightError(f"assert_plan got {found}.", hint='pass one of them, e.g. mesh="fsdp:8".')
    if setup is None:
        assert mesh is not None
        setup = Setup(mesh=mesh, rows=rows)
    elif rows is not None:
        setup = dataclasses.replace(setup, rows=rows)
    if exposed is not None and compile is False:
        raise MeshwrightError("`exposed` needs a compiled program.", hint="pass compile=True.")
    made: Compiled | None = None
    if isinstance(compile, Compiled):
        made = compile
    elif compile:
        made = compile_step(job, target, setup, **limits)
    if made is not None and WIDENED in made.notes and max_wire_bytes is not None:
        warnings.warn(
            f"max_wire_bytes is compared with other bytes than those of the machine you train on: {WIDENED}.\n"
            "hint: name that machine, e.g. assert_plan(job, 'v5p:2x2x2', ...), with compile=True if its compiler is "
            "installed; or compile for CPUs in precision='float32'.",
            MeshwrightWarning,
            stacklevel=2,
        )
    known = load_job(job) if isinstance(job, str) else job
    plan = make_plan(known, parse_target(target), setup, profile=profile, compiled=made)
    problems = [
        *_memory_problems(plan, max_bytes),
        *_sent_problems(plan, max_wire_bytes),
        *_exposed_problems(plan, exposed, ignore_bytes),
        *_time_problems(plan, max_seconds, min_mfu),
    ]
    if problems:
        lines = "\n".join(f"- {problem}" for problem in problems)
        message = f"the plan {setup} on {plan.target.title} exceeds its limits:\n{lines}"
        raise PlanError(message, plan=plan, problems=tuple(problems))
    return plan


def _memory_problems(plan: Plan, most: float | None) -> list[str]:
    memory = plan.memory
    if memory.fits is False:
        return [f"memory: it {memory.verdict}"]
    if most is None or memory.total <= most:
        return []
    largest = sorted(memory.parts, key=lambda part: -part.bytes)[:4]
    parts = ", ".join(f"{part.name} {format_bytes(part.bytes)}" for part in largest)
    return [_beyond("memory", memory.total, most, f"per device ({memory.basis}); the largest parts are {parts}")]


def _sent_problems(plan: Plan, most: float | None) -> list[str]:
    total = sum(item.wire_bytes for item in plan.sent)
    if most is None or total <= most:
        return []
    largest = sorted(plan.sent, key=lambda item: -item.wire_bytes)[:4]
    parts = ", ".join(f"{item.kind} over {item.axis} {format_bytes(item.wire_bytes)}" for item in largest)
    return [_beyond("sent", total, most, f"per device and step ({plan.sent[0].basis}); the largest are {parts}")]


def _exposed_problems(plan: Plan, most: int | None, ignored: float) -> list[str]:
    if most is None or plan.compiled is None:
        return []

    def size(collective: CompiledCollective) -> float:
        return collective.trips * collective.wire_bytes

    found = [c for c in plan.compiled.collectives if size(c) * (1 - c.hidden_share) > ignored]
    if len(found) <= most:
        return []
    lines = [
        f"{c.kind} over {'+'.join(c.axes)}, {format_bytes(size(c))} per step, {c.verdict} ({c.serves or c.source})"
        for c in sorted(found, key=size, reverse=True)[:8]
    ]
    total = len(plan.compiled.collectives)
    said = f"exposed: {len(found)} of {total} collectives expose over {format_bytes(ignored)} per step; allowed: {most}"
    return ["\n    ".join([said, *lines])]


def _time_problems(plan: Plan, most: float | None, least: float | None) -> list[str]:
    if most is None and least is None:
        return []
    if plan.time is None or plan.mfu is None:
        raise MeshwrightError(f"step time is unknown for {plan.target}.", hint="drop max_seconds and min_mfu.")
    found = []
    if most is not None and plan.time.step.value > most:
        step, within = plan.time.step, f"within {plan.time.error:.0%}"
        found.append(f"time: {step.value:.4g} s per step ({step.basis}, {within}); allowed: {most:.4g} s")
    if least is not None and plan.mfu < least:
        found.append(f"MFU: {plan.mfu:.1%} ({plan.time.step.basis}); required: {least:.1%}")
    return found


def _beyond(what: str, value: float, most: float, where: str) -> str:
    return f"{what}: {format_bytes(value)}, {format_bytes(value - most)} more than {format_bytes(most)}, {where}"
