"""Command lines that train or reproduce a plan."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from meshwright.loop.settings.options import OPTIMIZERS
from meshwright.pages import compact
from meshwright.plan.plan import Plan
from meshwright.plan.step_setup import Setup


@dataclass(frozen=True)
class PlannedJob:
    """The planned job as a command line names it: a built-in model and its row length, or a job reference.

    Example:
        >>> PlannedJob(model="decoder-7b", num_tokens=4096).name
        'decoder-7b'
    """

    model: str | None = None
    model_options: tuple[str, ...] = ()
    num_tokens: int | None = None
    job: str | None = None
    lora: str | None = None

    @property
    def name(self) -> str:
        return self.model or self.job or "a job"

    @property
    def described(self) -> str:
        """Its name with the options that make it another model than its name says.

        >>> PlannedJob(model="decoder-70b", model_options=("num_layers=126",)).described
        'decoder-70b with num_layers=126'
        """
        more = [*self.model_options, *([] if self.lora is None else [f"lora {self.lora}"])]
        return f"{self.name} with {', '.join(more)}" if more else self.name

    def titled(self, num_params: int) -> str:
        """Returns its name and size for a title; a model with other sizes than its name says has that of its family.

        >>> PlannedJob(model="decoder-70b").titled(70_550_000_000)
        'decoder-70b (70.5B parameters)'
        >>> PlannedJob(model="decoder-70b", model_options=("num_layers=126",)).titled(109_000_000_000)
        'decoder (109B parameters)'
        """
        name = self.name.partition("-")[0] if self.model_options else self.name
        size = f" ({compact(num_params)} parameters)" if num_params else ""
        return f"{name}{' with adapters' if self.lora else ''}{size}"

    def arguments(self) -> list[str]:
        """Returns the arguments of `meshwright train` that name it."""
        if self.model is None:
            return [*([] if self.job is None else ["--job", self.job]), *self.adapters()]
        options = ["--model-options", *self.model_options] if self.model_options else []
        tokens = [] if self.num_tokens is None else ["--num-tokens", str(self.num_tokens)]
        return ["--model", self.model, *options, *tokens, *self.adapters()]

    def adapters(self) -> list[str]:
        """Returns the arguments that name its adapters."""
        return [] if self.lora is None else ["--lora", self.lora]


def train_command(plan: Plan, subject: PlannedJob) -> str | None:
    """Returns the command that trains as planned, to run on every host.

    None if `meshwright train` does not have the plan's optimizer. The command does not set the rows of a job, which
    defines its own batch.

    Example:
        >>> from meshwright.models import Decoder
        >>> from meshwright.plan.plan import make_plan
        >>> from meshwright.train import language_job
        >>> job = language_job(Decoder.named("tiny"), batch_size=8, num_tokens=16)
        >>> plan = make_plan(job, "cpu:8", Setup(mesh="fsdp:8"))
        >>> train_command(plan, PlannedJob(model="decoder-tiny", num_tokens=16))[:61]
        'meshwright train --model decoder-tiny --num-tokens 16 --batch'
    """
    if plan.setup.optimizer not in OPTIMIZERS:
        return None
    rows = [] if subject.model is None else ["--batch-size", str(plan.rows)]
    return shlex.join(["meshwright", "train", *subject.arguments(), *rows, *setup_arguments(plan.setup)])


def how_to_run(plan: Plan, subject: PlannedJob) -> str:
    """Returns one line with the command that trains as planned, or another way if there is no such command."""
    line = train_command(plan, subject)
    if line is None:
        known = ", ".join(OPTIMIZERS)
        return f"run it with make_train_step: `meshwright train` has {known}, not {plan.setup.optimizer}"
    return f"it does not fit; to run it anyway: {line}" if plan.memory.fits is False else f"run it: {line}"


def plan_command(plan: Plan, subject: PlannedJob) -> str:
    """Returns the command that reproduces a plan.

    Example:
        >>> from meshwright.models import Decoder
        >>> from meshwright.plan.plan import make_plan
        >>> from meshwright.train import language_job
        >>> job = language_job(Decoder.named("tiny"), batch_size=8, num_tokens=16)
        >>> plan = make_plan(job, "cpu:8", Setup(mesh="fsdp:8"))
        >>> plan_command(plan, PlannedJob(job="train.py:job"))[:60]
        'meshwright plan train.py:job --target cpu:8 --batch-size 8 -'
    """
    named = subject.arguments() if subject.job is None else [subject.job, *subject.adapters()]
    target = ["--target", plan.target.name, "--batch-size", str(plan.rows)]
    price = [] if plan.price is None else ["--price", f"{plan.price:.15g}"]
    own = [*_failing(plan), *([] if plan.compiled is not None else ["--no-compile"])]
    return shlex.join(["meshwright", "plan", *named, *target, *setup_arguments(plan.setup), *price, *own])


def _failing(plan: Plan) -> list[str]:
    if plan.goodput is None:
        return []
    given = plan.goodput.given
    storage = [] if given.storage_rate is None else ["--storage-rate", f"{given.storage_rate / 2**30:.15g}"]
    return ["--mtbf", f"{given.mtbf_hours:.15g}", "--restart", f"{given.restart_s:.15g}", *storage]


def setup_arguments(setup: Setup) -> list[str]:
    """Returns a setup as command-line options, without most defaults.

    Example:
        >>> setup_arguments(Setup(mesh="fsdp:8,tp:4", remat="full", num_minibatches=2))
        ['--mesh', 'fsdp:8,tp:4', '--remat', 'full', '--precision', 'mixed', '--minibatches', '2']
    """
    given = {
        "--mesh": setup.mesh,
        "--remat": setup.remat,
        **setup.precision_options(),  # also if it is the default, which differs in `train`
        "--minibatches": str(setup.num_minibatches) if setup.num_minibatches > 1 else None,
        "--sync": setup.sync,
        "--pipeline": setup.pipeline,
        "--pipeline-rounds": None if setup.pipeline_rounds is None else str(setup.pipeline_rounds),
        "--microbatches": None if setup.num_microbatches is None else str(setup.num_microbatches),
        "--view": setup.view,
        "--zero-axis": setup.zero_axis,
    }
    found = [word for name, value in given.items() if value is not None for word in (name, value)]
    found += ["--pad", *setup.pad] if setup.pad else []
    found += [] if setup.overlap else ["--no-overlap"]
    return found + ([] if setup.optimizer == "adamw" else ["--optimizer", setup.optimizer])
