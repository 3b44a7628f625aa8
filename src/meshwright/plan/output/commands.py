"""The commands that run a plan, or make it again, to be copied."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import get_args, get_type_hints

from meshwright.loop.config import OptimizerOptions
from meshwright.plan.plan import Plan
from meshwright.plan.step_setup import Setup


@dataclass(frozen=True)
class PlannedJob:
    """What is planned, as a command line names it: a model of ours and its shape of a batch, or a job.

    Example:
        >>> PlannedJob(model="decoder-7b", num_tokens=4096).name
        'decoder-7b'
    """

    model: str | None = None
    model_options: tuple[str, ...] = ()
    num_tokens: int | None = None
    job: str | None = None

    @property
    def name(self) -> str:
        return self.model or self.job or "a job"

    def arguments(self) -> list[str]:
        """Returns what `meshwright train` calls it."""
        if self.model is None:
            return [] if self.job is None else ["--job", self.job]
        options = ["--model-options", *self.model_options] if self.model_options else []
        tokens = [] if self.num_tokens is None else ["--num-tokens", str(self.num_tokens)]
        return ["--model", self.model, *options, *tokens]


def train_command(plan: Plan, subject: PlannedJob) -> str | None:
    """Returns the command that trains as planned, to be given on every host of the machine.

    None where there is no such command: a plan takes every optimizer of optax, and `meshwright train` a few. A job
    brings its own batch, of which the command line cannot change the rows.
    """
    if plan.setup.optimizer not in _trained_with():
        return None
    rows = [] if subject.model is None else ["--batch-size", str(plan.rows)]
    return shlex.join(["meshwright", "train", *subject.arguments(), *rows, *setup_arguments(plan.setup)])


def how_to_run(plan: Plan, subject: PlannedJob) -> str:
    """Returns a line with the command that trains as planned, and whether it is one to give."""
    line = train_command(plan, subject)
    if line is None:
        known = ", ".join(_trained_with())
        return f"run it: by make_train_step; `meshwright train` has no {plan.setup.optimizer}, but {known}"
    return f"it does not fit; to run it all the same: {line}" if plan.memory.fits is False else f"run it: {line}"


def _trained_with() -> tuple[str, ...]:
    return get_args(get_type_hints(OptimizerOptions)["optimizer"])


def plan_command(plan: Plan, subject: PlannedJob) -> str:
    """Returns the command that makes this plan."""
    named = subject.arguments()
    if subject.job is not None:
        named = [subject.job]
    target = ["--target", plan.target.name, "--batch-size", str(plan.rows)]
    price = [] if plan.price is None else ["--price", f"{plan.price:g}"]
    own = [] if plan.compiled is not None else ["--no-compile"]
    return shlex.join(["meshwright", "plan", *named, *target, *setup_arguments(plan.setup), *price, *own])


def setup_arguments(setup: Setup) -> list[str]:
    """Returns a setup as options, those that have their defaults left out.

    Example:
        >>> setup_arguments(Setup(mesh="fsdp:8,tp:4", remat="full", num_minibatches=2))
        ['--mesh', 'fsdp:8,tp:4', '--remat', 'full', '--precision', 'mixed', '--minibatches', '2']
    """
    given = {
        "--mesh": setup.mesh,
        "--remat": setup.remat,
        "--precision": setup.precision if isinstance(setup.precision, str) else None,  # `train` has another default
        "--minibatches": str(setup.num_minibatches) if setup.num_minibatches > 1 else None,
        "--sync": setup.sync,
        "--view": setup.view if setup.view != "local" else None,
        "--zero-axis": setup.zero_axis,
    }
    found = [word for name, value in given.items() if value is not None for word in (name, value)]
    found += [] if setup.overlap else ["--no-overlap"]
    return found + ([] if setup.optimizer == "adamw" else ["--optimizer", setup.optimizer])
