"""`meshwright plan`: memory, communication and time of a step on a machine that need not be here."""

from __future__ import annotations

import contextlib
import json as json_lib
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from meshwright.cli import show
from meshwright.errors import ConfigError, JobError
from meshwright.mesh.string import parse_mesh
from meshwright.plan.compiled.compile import Compiled, CompileError, compile_step
from meshwright.plan.compiled.topology import can_compile_for
from meshwright.plan.output.commands import PlannedJob, plan_command, train_command
from meshwright.plan.output.plan_diff import PlanData, PlanDiff, diff_plans, parse_setup, read_plan
from meshwright.plan.output.summary import Summary, plan_summary, search_summary
from meshwright.plan.plan import Plan, make_plan
from meshwright.plan.search import Rejected, compile_best
from meshwright.plan.search import search as search_plans
from meshwright.plan.step_setup import Setup
from meshwright.plan.target import Target, parse_target
from meshwright.train.job import job_errors, load_job

DEFAULT_TOKENS = 4096


def plan(
    job: Annotated[str, tyro.conf.Positional] = "",
    /,
    target: str = "",
    mesh: str = "",
    search: bool = False,
    model: str | None = None,
    model_options: tuple[str, ...] = (),
    batch_size: int | None = None,
    num_tokens: int | None = None,
    remat: Literal["none", "dots", "full", "offload"] | None = None,
    precision: Literal["float32", "mixed", "bfloat16"] = "mixed",
    minibatches: int | None = None,
    sync: Literal["every", "hybrid", "once"] | None = None,
    view: Literal["local", "global"] = "local",
    zero_axis: str | None = None,
    overlap: bool = True,
    optimizer: str = "adamw",
    constraints: str = "",
    top: int | None = None,
    compile: bool = True,
    python: str | None = None,
    timeout: float = 180.0,
    price: float | None = None,
    diff: tuple[str, ...] | None = None,
    against: str | None = None,
    json: bool = False,
    html: Path | None = None,
) -> int:
    """Plan a training step for a machine that need not be here: does it fit, what is sent, how long does it take?

    Without a compiler for that machine everything is computed, and stderr says how to get one. Exits with 1 where
    nothing fits.

    Args:
        job: module:attribute, or file.py:attribute; or else --model.
        target: the machine: v5p:4x4x8, v5e:16x16, v5p:4x4x8*4 (slices), h200:8x8 (hosts x GPUs), cpu:8.
        mesh: such as "fsdp:32,tp:4"; the job's own when left out.
        search: rank all meshes, remat policies, minibatches and sync modes, and compile the best.
        model: a model of ours by name, such as decoder-7b.
        model_options: fields of it to change, such as num_layers=4.
        batch_size: rows per step, over all devices. The job's own by default; for a model, one for each device.
        num_tokens: tokens per row of a model; 4096 by default.
        remat: what the backward pass computes again; none by default, and all are tried by a search.
        precision: what the step computes in.
        minibatches: parts in which a batch is computed, one after the other; 1 by default.
        sync: how often the devices exchange the gradients of minibatches; hybrid by default.
        view: who communicates: our layers (local), or XLA (global).
        zero_axis: splits the optimizer's statistics along this axis too (ZeRO-1).
        overlap: asks the compiler for what hides collectives behind matmuls on those chips.
        optimizer: one of optax, by name.
        constraints: what a search keeps to: "tp<=8, pp=1, batch=4M tokens, remat=full|dots".
        top: how many plans a search shows and compiles; 3 by default.
        compile: whether to ask the machine's compiler.
        python: an interpreter that has that compiler; this one by default.
        timeout: seconds for each compilation.
        price: dollars per hour of one device.
        diff: two plans to compare: files that --json wrote, or configurations such as "fsdp:32,tp:4 remat=full".
        against: with --search, a file or configuration that the best is compared with, cause by cause.
        json: print JSON.
        html: write a page about it to this file.
    """
    _check_numbers(
        {"--batch-size": batch_size, "--num-tokens": num_tokens, "--minibatches": minibatches, "--top": top},
        timeout=timeout,
        price=price,
    )
    if diff is not None and len(diff) != 2:
        raise ConfigError(
            f"--diff takes two plans, and got {len(diff)}{': ' if diff else ''}{', '.join(map(repr, diff))}.",
            hint='--diff "fsdp:8 remat=full" "fsdp:4,tp:2", or two files that --json wrote; a job goes before it.',
        )
    if diff is not None and all(map(_is_file, diff)):
        return _show_diff(read_plan(diff[0]), read_plan(diff[1]), json=json, html=html)
    missing = [
        one for one in (*(diff or ()), against) if one is not None and one.endswith(".json") and not _is_file(one)
    ]
    if missing:
        raise ConfigError(
            f"there is no file {missing[0]!r}.", hint="write a plan with: meshwright plan ... --json > FILE"
        )
    if constraints and not search:
        raise ConfigError("--constraints are for a search.", hint="add --search.")
    if top is not None and not search:
        raise ConfigError("--top is for a search.", hint="add --search.")
    if against is not None and not search:
        raise ConfigError("--against is for a search.", hint='--search --against "dp:32,fsdp:8", or --diff A B.')
    if not target:
        raise ConfigError("a plan needs a machine.", hint="--target v5p:4x4x8, h200:8x8 or cpu:8.")
    machine = parse_target(target)
    subject = _subject(job, model, model_options, num_tokens)
    known = _load(subject, rows=machine.num_devices if batch_size is None else batch_size)
    ask = _Ask(known, subject, machine, compile=compile, python=python, timeout=timeout, price=price)
    # A model's rows are in its batch already.
    rows = batch_size if subject.model is None else None
    base = Setup(
        mesh=mesh or getattr(known, "mesh", None) or "",
        rows=rows,
        remat=remat or "none",
        precision=precision,
        num_minibatches=1 if minibatches is None else minibatches,
        sync=sync,
        view=view,
        zero_axis=zero_axis,
        overlap=overlap,
        optimizer=optimizer,
    )
    if diff is not None:
        given = [read_plan(one) if _is_file(one) else parse_setup(one, base) for one in diff]
        if ask.compiles:  # before minutes of compiling
            for one in given:
                if isinstance(one, Setup):
                    ask.check(one)
        sides = [ask.plan(one).to_json() if isinstance(one, Setup) else one for one in given]
        return _show_diff(*sides, json=json, html=html)
    if search:
        if mesh or view != "local" or zero_axis is not None:
            wrong = "--mesh" if mesh else "--view" if view != "local" else "--zero-axis"
            raise ConfigError(f"a search does not take {wrong}.", hint='--constraints "tp<=8, fsdp>=16" narrows it.')
        asked = {
            "remat": remat,
            "minibatches": minibatches,
            "sync": sync,
            "batch": None if rows is None else f"{rows} rows",
        }
        narrowed = [constraints, *(f"{name}={value}" for name, value in asked.items() if value is not None)]
        limits = ", ".join(filter(None, narrowed))
        if against is not None:  # before minutes of compiling
            if _is_file(against):
                read_plan(against)
            else:
                ask.check(parse_setup(against, base))
        return _search(ask, limits, base, top=3 if top is None else top, json=json, html=html, against=against)
    if not base.mesh:
        raise JobError("no mesh was given, and the job names none.", hint='add --mesh "fsdp:8,tp:4", or --search.')
    made = ask.plan(base)
    if json:
        print(json_lib.dumps(_plan_json(made, subject), indent=1))
    else:
        show(plan_summary(made, subject))
    _page(ask, [made], html)
    return 1 if made.memory.fits is False else 0


class _Ask:
    """What is planned, for what, and how; remembers why something was not compiled."""

    def __init__(
        self,
        job: Any,
        subject: PlannedJob,
        target: Target,
        *,
        compile: bool,
        python: str | None,
        timeout: float,
        price: float | None,
    ) -> None:
        self.job, self.subject, self.target, self.price = job, subject, target, price
        self.limits = {"python": python, "timeout_s": timeout}
        self.notes: list[str] = []
        self.compiles = compile and (python is not None or can_compile_for(target))
        if compile and not self.compiles:
            self.note(
                f"memory and communication are computed: the compiler for {target.kind} is not installed here.\n"
                f'hint: pip install "meshwright[{target.platform}]" for compiled figures.'
            )

    def note(self, text: str) -> None:
        """Says something now, and on the page."""
        _tell(f"note: {text}")
        self.notes.append(text)

    @property
    def compiled_from(self) -> Any:
        """What another process can load: the reference to a job where there is one."""
        return self.subject.job or self.job

    def errors(self) -> contextlib.AbstractContextManager[None]:
        """What a job's own functions raise is told with their lines."""
        return job_errors(self.job, self.subject.job) if self.subject.job else contextlib.nullcontext()

    def check(self, setup: Setup) -> Plan:
        """Returns one plan, computed: an error tells what is wrong with a setup in a second."""
        mesh = str(parse_mesh(setup.mesh).resolve(self.target.num_devices))
        with self.errors():
            return make_plan(self.job, self.target, replace(setup, mesh=mesh), price=self.price)

    def plan(self, setup: Setup) -> Plan:
        """Returns one plan, compiled if that is possible."""
        made = self.check(setup)  # before minutes of compiling
        setup = made.setup
        compiled = self._compile(setup) if self.compiles else None
        if compiled is None:
            return made
        return make_plan(self.job, self.target, setup, compiled=compiled, price=self.price)

    def _compile(self, setup: Setup) -> Compiled | None:
        _tell(f"compiling {setup} for {self.target}")
        try:
            return compile_step(self.compiled_from, self.target, setup, **self.limits)  # type: ignore[arg-type]
        except CompileError as error:
            self.note(f"memory and communication are computed, as it could not be compiled ({error.reason}): {error}")
            return None


def _search(
    ask: _Ask, constraints: str, base: Setup, *, top: int, json: bool, html: Path | None, against: str | None
) -> int:
    with ask.errors():
        found = search_plans(
            ask.job,
            ask.target,
            constraints=constraints,
            precision=base.precision,
            optimizer=base.optimizer,
            price=ask.price,
        )
    best: Sequence[Plan] = found.ranked[:top]
    failed: Sequence[Rejected] = ()
    if ask.compiles and best:
        done, failed = compile_best(ask.compiled_from, found, top=top, tell=_tell, **ask.limits)
        if done:
            best = done
        else:
            ask.note("none of the best could be compiled; what is shown is computed.")
    compared = None
    if against is not None and best:
        rows = replace(base, rows=found.rows)
        given = read_plan(against) if _is_file(against) else ask.plan(parse_setup(against, rows)).to_json()
        compared = diff_plans(given, best[0])
    if json:
        data = {
            "subject": ask.subject.name,
            "target": ask.target.name,
            "considered": found.considered,
            "fit": len(found.ranked),
            "seconds": found.seconds,
            "rejected": dict(found.reasons()),
            "not_kept": [{"setup": item.setup.to_json(), "reason": item.reason} for item in failed],
            "plans": [_plan_json(plan, ask.subject) for plan in best],
            **({} if compared is None else {"against": compared.to_json()}),
        }
        print(json_lib.dumps(data, indent=1))
    else:
        said = search_summary(found, best, ask.subject, failed=failed, top=top)
        show(said if compared is None else Summary((*said.parts, *compared.why().parts)))
    _page(ask, best, html, found=found, compared=compared)
    return 0 if best else 1


def _show_diff(before: PlanData, after: PlanData, *, json: bool, html: Path | None) -> int:
    changed = diff_plans(before, after)
    if json:
        print(json_lib.dumps(changed.to_json(), indent=1))
    else:
        show(changed)
    if html is not None:
        from meshwright.plan.output.diff_page import build_diff_page

        _tell(f"wrote {build_diff_page(changed, html)}")
    return 0


def _page(
    ask: _Ask, plans: Sequence[Plan], path: Path | None, *, found: Any = None, compared: PlanDiff | None = None
) -> None:
    if path is None:
        return
    if not plans:
        _tell("note: nothing fits, so there is no page.")
        return
    from meshwright.plan.output.plan_page import build_plan_page

    first, *others = plans
    place = build_plan_page(
        first,
        path,
        job=ask.job,
        subject=ask.subject,
        others=others,
        found=found,
        notes=ask.notes,
        compared=compared,
    )
    _tell(f"wrote {place}")


def _subject(job: str, model: str | None, model_options: tuple[str, ...], num_tokens: int | None) -> PlannedJob:
    if bool(job) == (model is not None):
        raise ConfigError("a plan is of a job or of a model.", hint="my_pkg.train:job, or --model decoder-7b.")
    if job:
        if num_tokens is not None or model_options:
            raise ConfigError("a job brings its own model and tokens.", hint="leave the options of models out.")
        return PlannedJob(job=job)
    tokens = DEFAULT_TOKENS if num_tokens is None else num_tokens
    return PlannedJob(model=model, model_options=model_options, num_tokens=tokens)


def _check_numbers(counts: dict[str, int | None], *, timeout: float, price: float | None) -> None:
    """Raises where an option has a number that it cannot have."""
    for name, value in counts.items():
        if value is not None and value < 1:
            raise ConfigError(f"{name} {value} is not possible.", hint=f"{name} takes a whole number, 1 or more.")
    if not timeout > 0:
        raise ConfigError(f"--timeout {timeout:g} leaves no time.", hint="--timeout takes seconds, more than 0.")
    if price is not None and not 0 <= price < math.inf:
        raise ConfigError(
            f"--price {price:g} is no price.", hint="--price takes dollars per hour of one device, 0 or more."
        )


def _load(subject: PlannedJob, *, rows: int) -> Any:
    if subject.job is not None:
        return load_job(subject.job)
    from meshwright.loop.choices import make_model
    from meshwright.train.language_job import language_job

    assert subject.model is not None
    assert subject.num_tokens is not None
    model = make_model(subject.model, subject.model_options)
    # Packed, as `meshwright train` has its batches.
    return language_job(model, batch_size=rows, num_tokens=subject.num_tokens, packed=True)


def _plan_json(plan: Plan, subject: PlannedJob) -> dict[str, Any]:
    commands = {"command": train_command(plan, subject), "plan_command": plan_command(plan, subject)}
    return {"subject": subject.name, **plan.to_json(), **commands}


def _is_file(text: str) -> bool:
    return Path(text).is_file()


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
