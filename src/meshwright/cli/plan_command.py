"""`meshwright plan`, `plan search` and `plan diff`: memory, communication and time per step on any machine."""

from __future__ import annotations

import contextlib
import json as json_lib
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from meshwright.cli import show
from meshwright.cli.plan_options import StepOptions
from meshwright.errors import ConfigError, JobError
from meshwright.plan.compiled.compile import AdaptedReference, CompileError, compile_step
from meshwright.plan.compiled.topology import can_compile_for
from meshwright.plan.expected_goodput import plan_goodput
from meshwright.plan.output.commands import PlannedJob, plan_command, train_command
from meshwright.plan.output.explain import PlanData
from meshwright.plan.output.plan_diff import PlanDiff, diff_plans, parse_setup, read_plan
from meshwright.plan.output.summary import Summary, plan_summary, search_summary
from meshwright.plan.plan import Plan, make_plan
from meshwright.plan.search import Rejected, Search, compile_best
from meshwright.plan.search import search as search_plans
from meshwright.plan.search_limits import parse_constraints
from meshwright.plan.step_setup import Setup
from meshwright.plan.target import mesh_on, parse_target
from meshwright.train.fine_tuning.lora import adapt_job
from meshwright.train.jobs.job_loading import job_errors, load_job

DEFAULT_TOKENS = 4096
# Options of `meshwright plan` that are now commands, or options of one.
_MOVED = {
    "--search": "meshwright plan search ...",
    "--constraints": 'meshwright plan search --constraints "tp<=8" ...',
    "--top": "meshwright plan search --top 3 ...",
    "--against": 'meshwright plan search --against "dp:32,fsdp:8" ...',
    "--diff": 'meshwright plan diff "fsdp:8 remat=full" "fsdp:4,tp:2" ...',
}
_Job = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[JOB]")]


_Step = Annotated[StepOptions, tyro.conf.OmitArgPrefixes]


def plan(
    job: _Job = "",
    /,
    mesh: str | None = None,
    view: Literal["auto", "local", "global"] = "auto",
    zero_axis: str | None = None,
    pad: tuple[str, ...] = (),
    pipeline_rounds: int | None = None,
    step: _Step = StepOptions(),  # noqa: B008
) -> int:
    """Plan a training step for hardware you don't have: memory, communication and time.

    If the machine's compiler is not installed, all figures are computed from shapes and data sheets. Exits with status
    1 if the step does not fit.

    Args:
        job: Job to plan: module:attribute or file.py:attribute; or use --model.
        mesh: Mesh, e.g. "fsdp:32,tp:4"; if unset, the job's mesh.
        view: "local": Meshwright layers insert the collectives; "global": XLA does; "auto": as `train` chooses.
        zero_axis: Mesh axis to also shard the optimizer state over (ZeRO-1).
        pad: Regexes of parameters whose dims may be padded with zeros if the mesh does not divide them.
        pipeline_rounds: Stages per device with interleaved-1f1b and circular; if unset, the job's, or 2.
    """
    step.check(pipeline_rounds=pipeline_rounds)
    if mesh is not None and not mesh.strip():
        raise JobError("--mesh is empty.", hint='pass a mesh such as "fsdp:8,tp:4"; is a shell variable unset?')
    planner = _Planner(job, step)
    placed = mesh or getattr(planner.job, "mesh", None) or ""
    setup = planner.setup(mesh=placed, view=view, zero_axis=zero_axis, pad=pad, pipeline_rounds=pipeline_rounds)
    if not setup.mesh:
        hint = 'pass --mesh "fsdp:8,tp:4", or rank all meshes with `meshwright plan search`.'
        raise JobError("no mesh given, and the job has no default mesh.", hint=hint)
    made = planner.plan(setup)
    _print(_plan_json(made, planner.subject) if step.json else plan_summary(made, planner.subject))
    planner.write_page([made])
    return 1 if made.memory.fits is False else 0


def plan_search(
    job: _Job = "",
    /,
    constraints: str = "",
    top: int = 3,
    against: str | None = None,
    pad: tuple[str, ...] = (),
    step: _Step = StepOptions(),  # noqa: B008
) -> int:
    """Rank all meshes, remat policies, minibatch counts and sync modes by estimated step time, and compile the best.

    Exits with status 1 if nothing fits.

    Args:
        job: Job to plan: module:attribute or file.py:attribute; or use --model.
        constraints: Limits on the search, e.g. "tp<=8, pp=1, batch=4M tokens, remat=full|dots".
        top: Number of plans to show and compile.
        against: Plan to compare the best with: a file written by --json, or a setup like "dp:32,fsdp:8 remat=full".
        pad: Regexes of parameters whose dims may be padded with zeros on meshes that do not divide them.
    """
    step.check(top=top)
    if against is not None:
        _check_file(against)
    planner = _Planner(job, step)
    base = planner.setup(pad=pad)
    if against is not None and not _is_file(against):
        planner.check(parse_setup(against, base))  # fail before minutes of compiling
    given = None if against is None or not _is_file(against) else read_plan(against)
    found, best, failed = planner.search(constraints, top, pad)
    compared = None
    if against is not None and best:
        if given is None:
            given = planner.plan(parse_setup(against, replace(base, rows=found.rows))).to_json()
        compared = diff_plans(given, best[0])
    if step.json:
        _print(_search_json(found, best, failed, planner.subject, compared))
    else:
        said = search_summary(found, best, planner.subject, failed=failed, top=top)
        _print(said if compared is None else Summary((*said.parts, *compared.why().parts)))
    planner.write_page(best, found=found, compared=compared)
    return 0 if best else 1


def plan_diff(
    before: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="A")],
    after: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="B")],
    /,
    job: str = "",
    view: Literal["auto", "local", "global"] = "auto",
    zero_axis: str | None = None,
    pad: tuple[str, ...] = (),
    step: _Step = StepOptions(),  # noqa: B008
) -> int:
    """Explain the difference between two plans, cause by cause.

    Args:
        before: First plan: a file written by --json, or a setup like "fsdp:32,tp:4 remat=full".
        after: Second plan, in the same form. Two files need no further options.
        job: Job to plan: module:attribute or file.py:attribute; or use --model.
        view: "local": Meshwright layers insert the collectives; "global": XLA does; "auto": as `train` chooses.
        zero_axis: Mesh axis to also shard the optimizer state over (ZeRO-1).
        pad: Regexes of parameters whose dims may be padded with zeros if the mesh does not divide them.
    """
    step.check()
    for one in (before, after):
        _check_file(one)
    if _is_file(before) and _is_file(after):
        sides = [read_plan(before), read_plan(after)]
    else:
        planner = _Planner(job, step)
        base = planner.setup(view=view, zero_axis=zero_axis, pad=pad)
        given = [read_plan(one) if _is_file(one) else parse_setup(one, base) for one in (before, after)]
        if planner.compiles:  # fail before minutes of compiling
            for side in given:
                if isinstance(side, Setup):
                    planner.check(side)
        sides = [planner.plan(side).to_json() if isinstance(side, Setup) else side for side in given]
    changed = diff_plans(*sides)
    _print(changed.to_json() if step.json else changed)
    if step.html is not None:
        from meshwright.plan.output.plan_page import build_diff_page

        _tell(f"wrote {build_diff_page(changed, step.html)}")
    return 0


COMMANDS: dict[str, Callable[..., int]] = {"plan": plan, "plan search": plan_search, "plan diff": plan_diff}


def join_words(args: Sequence[str]) -> list[str]:
    """Joins a two-word command (`plan search`) into one argument; raises for options that are now commands."""
    if " ".join(args[:2]) in COMMANDS:
        return [" ".join(args[:2]), *args[2:]]
    for arg in args[1:] if args[:1] == ["plan"] else ():
        name = arg.partition("=")[0].replace("_", "-")
        if name in _MOVED:
            raise ConfigError(f"`meshwright plan` no longer has the option {name}.", hint=f"use: {_MOVED[name]}")
    return list(args)


class _Planner:
    """Plans one job on one machine, and collects notes for the page."""

    def __init__(self, job: str, options: StepOptions) -> None:
        if not options.target:
            hint = "pass the machine to plan for, e.g. --target v5p:4x4x8, h200:8x8 or cpu:8."
            raise ConfigError("--target is missing.", hint=hint)
        self.options, self.target = options, parse_target(options.target)
        self.subject = _subject(job, options)
        self.job = adapt_job(self._load(), adapters=options.lora)
        self.limits: dict[str, Any] = {"python": options.python, "timeout_s": options.timeout}
        self.notes: list[str] = []
        self.compiles = options.compile and (options.python is not None or can_compile_for(self.target))
        if options.compile and not self.compiles:
            self.note(
                "memory and communication are computed, because the compiler for "
                f"{self.target.kind} is not installed.\n"
                f'hint: run `pip install "meshwright[{self.target.platform}]"` to get compiled figures.'
            )

    def _load(self) -> Any:
        if self.subject.job is not None:
            return load_job(self.subject.job)
        from meshwright.loop.settings.choices import make_model
        from meshwright.train.jobs.language_job import language_job

        assert self.subject.model is not None
        assert self.subject.num_tokens is not None
        model = make_model(self.subject.model, self.subject.model_options)
        rows = self.target.num_devices if self.options.batch_size is None else self.options.batch_size
        # `meshwright train` packs its batches too.
        return language_job(model, batch_size=rows, num_tokens=self.subject.num_tokens, packed=True)

    def note(self, text: str) -> None:
        """Prints a note, and keeps it for the page."""
        _tell(f"note: {text}")
        self.notes.append(text)

    @property
    def compiled_from(self) -> Any:
        """The job as another process can load it: its reference if it has one."""
        if self.subject.job is not None and self.subject.lora is not None:
            return AdaptedReference(self.subject.job, self.subject.lora)
        return self.subject.job or self.job

    def errors(self) -> contextlib.AbstractContextManager[None]:
        """Reports errors of the job's functions with their file and line."""
        return job_errors(self.job, self.subject.job) if self.subject.job else contextlib.nullcontext()

    def setup(self, **changes: Any) -> Setup:
        """Returns the setup that the options describe; `rows` stays None for a model, whose batch has them."""
        options = self.options
        known = {
            "mesh": "",
            "rows": options.batch_size if self.subject.model is None else None,
            "remat": options.remat or "none",
            "precision": options.dtypes(),
            "num_minibatches": 1 if options.minibatches is None else options.minibatches,
            "sync": options.sync,
            "pipeline": options.pipeline,
            "num_microbatches": options.microbatches,
            "overlap": options.overlap,
            "optimizer": options.optimizer,
        }
        if changes.get("view") == "auto":
            changes["view"] = None
        return Setup(**{**known, **changes})

    def check(self, setup: Setup) -> Plan:
        """Returns the computed plan, or raises within a second if the setup is wrong."""
        mesh = str(mesh_on(self.target, setup.mesh))
        with self.errors():
            return make_plan(self.job, self.target, replace(setup, mesh=mesh), price=self.options.price)

    def with_goodput(self, plan: Plan) -> Plan:
        """Returns the plan with its expected goodput, if that was asked for."""
        given = self.options.reliability()
        return plan if given is None else replace(plan, goodput=plan_goodput(plan, given))

    def plan(self, setup: Setup) -> Plan:
        """Returns the plan of a setup, compiled if possible."""
        return self.with_goodput(self._plan(setup))

    def _plan(self, setup: Setup) -> Plan:
        made = self.with_goodput(self.check(setup))  # fail before minutes of compiling
        if not self.compiles:
            return made
        _tell(f"compiling {made.setup} for {self.target}")
        try:
            compiled = compile_step(self.compiled_from, self.target, made.setup, **self.limits)
        except CompileError as error:
            self.note(f"memory and communication are computed, because compiling failed ({error.reason}): {error}")
            return made
        return make_plan(self.job, self.target, made.setup, compiled=compiled, price=self.options.price)

    def search(
        self, constraints: str, top: int, pad: tuple[str, ...]
    ) -> tuple[Search, Sequence[Plan], Sequence[Rejected]]:
        """Returns a search, its best plans (compiled if possible), and those that failed to compile or do not fit."""
        options, rows = self.options, self.setup().rows
        batch = None if rows is None else f"{rows} rows"
        asked = {"remat": options.remat, "minibatches": options.minibatches, "sync": options.sync, "batch": batch}
        asked |= {"pipeline": options.pipeline, "microbatches": options.microbatches}
        limits = parse_constraints(constraints)
        if options.batch_size is not None and (limits.rows is not None or limits.batch_tokens is not None):
            raise ConfigError("both --batch-size and a batch in --constraints given.", hint="keep one of them.")
        narrowed = [constraints, *(f"{name}={value}" for name, value in asked.items() if value is not None)]
        with self.errors():
            found = search_plans(
                self.job,
                self.target,
                constraints=", ".join(filter(None, narrowed)),
                precision=options.dtypes(),
                optimizer=options.optimizer,
                price=options.price,
                pad=pad,
            )
        best = tuple(map(self.with_goodput, found.ranked[:top]))
        if not (self.compiles and best):
            return found, best, ()
        done, failed = compile_best(self.compiled_from, found, top=top, tell=_tell, **self.limits)
        if not done:
            self.note("none of the best plans could be compiled; the plans shown are computed.")
        return found, tuple(map(self.with_goodput, done)) or best, failed

    def write_page(
        self, plans: Sequence[Plan], *, found: Search | None = None, compared: PlanDiff | None = None
    ) -> None:
        """Writes the page about the first plan, if --html is set."""
        if self.options.html is None:
            return
        if not plans:
            _tell("note: nothing fits, so no page was written.")
            return
        from meshwright.plan.output.plan_page import build_plan_page

        first, *others = plans
        more: dict[str, Any] = {"others": others, "found": found, "notes": self.notes, "compared": compared}
        _tell(f"wrote {build_plan_page(first, self.options.html, job=self.job, subject=self.subject, **more)}")


def _subject(job: str, options: StepOptions) -> PlannedJob:
    if bool(job) == (options.model is not None):
        hint = "pass one of them, e.g. my_pkg.train:job or --model decoder-7b."
        if re.search(r"[<>=]", job):
            hint = f'{job!r} looks like a constraint: pass all of them as one text, e.g. --constraints "tp<=4 pp=1".'
        raise ConfigError(f"{'both a job and --model' if job else 'neither a job nor --model'} given.", hint=hint)
    if job:
        if options.num_tokens is not None or options.model_options:
            hint = "drop them: a job defines its own model and tokens."
            raise ConfigError("--num-tokens and --model-options apply only to --model.", hint=hint)
        return PlannedJob(job=job, lora=options.lora)
    tokens = DEFAULT_TOKENS if options.num_tokens is None else options.num_tokens
    sizes = options.model_options
    return PlannedJob(model=options.model, model_options=sizes, num_tokens=tokens, lora=options.lora)


def _plan_json(plan: Plan, subject: PlannedJob) -> dict[str, Any]:
    commands = {"command": train_command(plan, subject), "plan_command": plan_command(plan, subject)}
    return {"subject": subject.name, **plan.to_json(), **commands}


def _search_json(
    found: Search, best: Sequence[Plan], failed: Sequence[Rejected], subject: PlannedJob, compared: PlanDiff | None
) -> PlanData:
    return {
        "subject": subject.name,
        "target": found.target.name,
        "considered": found.considered,
        "fit": len(found.ranked),
        "seconds": found.seconds,
        "rejected": dict(found.reasons()),
        "not_kept": [{"setup": item.setup.to_json(), "reason": item.reason} for item in failed],
        "nearest": None if found.nearest is None else found.nearest.to_json(),
        "plans": [_plan_json(plan, subject) for plan in best],
        **({} if compared is None else {"against": compared.to_json()}),
    }


def _check_file(text: str) -> None:
    if text.endswith(".json") and not _is_file(text):
        hint = "write a plan with: meshwright plan ... --json > FILE"
        raise ConfigError(f"file {text!r} does not exist.", hint=hint)


def _is_file(text: str) -> bool:
    return Path(text).is_file()


def _print(said: Summary | PlanDiff | PlanData) -> None:
    if isinstance(said, Summary | PlanDiff):
        show(said)
    else:
        print(json_lib.dumps(said, indent=1))


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
