"""Options that `meshwright plan`, `plan search` and `plan diff` share."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from meshwright.errors import ConfigError
from meshwright.parallel.pipeline.named_schedules import ScheduleName
from meshwright.plan.expected_goodput import RESTART_S, Reliability
from meshwright.train.precision import Precision

# Range of each option on failures, its unit and an example.
_RELIABILITY = {
    "mtbf": (0.01, 1e9, "hours", 50_000),
    "restart": (0, 1e7, "seconds", 300),
    "storage-rate": (1e-6, 1e6, "GiB/s", 10),
}


@dataclass(frozen=True)
class StepOptions:
    """The step to plan, the machine, and the output.

    Args:
        target: Machine, e.g. v5p:4x4x8, v5e:16x16, v5p:4x4x8*4 (slices), h200:8x8 (hosts x GPUs), cpu:8.
        model: Built-in model to plan instead of a job, e.g. decoder-7b.
        model_options: Model fields to override, e.g. num_layers=4.
        batch_size: Rows per step over all devices; if unset, the job's batch, or one row per device with --model.
        num_tokens: Tokens per row with --model; 4096 if unset.
        lora: Low-rank adapters to train, e.g. rank=16,alpha=32,targets=REGEX,base=int8; if unset, all parameters.
        remat: Rematerialization policy; if unset, none, and a search tries none, dots and full.
        precision: Precision of the step.
        fp8_matmuls: Regex of the parameters that --precision fp8 multiplies in fp8; if unset, the layers' projections.
        fp8_scaling: Scales of inputs and gradients with --precision fp8; if unset, delayed.
        fp8_least_dim: Smallest dim of a matrix that --precision fp8 multiplies in fp8; if unset, 256.
        minibatches: Number of minibatches per step, for gradient accumulation; if unset, 1, and a search tries 1 to 32.
        sync: How often devices exchange the gradients of minibatches; if unset, hybrid, and a search also tries once.
        pipeline: Pipeline schedule; if unset, the job's (gpipe), and a search tries all.
        microbatches: Number of microbatches in a pipeline; if unset, 2 per stage, and a search tries 2 to 32.
        overlap: Ask the compiler to overlap collectives with matmuls.
        optimizer: Name of an optax optimizer.
        compile: Compile the step for the machine, if its compiler is installed.
        python: Interpreter whose compilers to use; if unset, this one.
        timeout: Time limit per compilation, in seconds without those in which other programs use the cores.
        price: Price per device-hour, in dollars.
        mtbf: Mean hours between two failures of one chip; if set, the plan has the expected goodput.
        restart: Seconds from a failure until the checkpoint begins to load, with --mtbf; 300 if unset.
        storage_rate: GiB/s that all hosts together write and read, with --mtbf; 1 per host, at most 100, if unset.
        json: Print JSON.
        html: Write an HTML page to this file.
    """

    target: str = ""
    model: str | None = None
    model_options: tuple[str, ...] = ()
    batch_size: int | None = None
    num_tokens: int | None = None
    lora: str | None = None
    remat: Literal["none", "dots", "full", "offload"] | None = None
    precision: Literal["float32", "mixed", "bfloat16", "fp8"] = "mixed"
    fp8_matmuls: str | None = None
    fp8_scaling: Literal["delayed", "current"] | None = None
    fp8_least_dim: int | None = None
    minibatches: int | None = None
    sync: Literal["every", "hybrid", "once"] | None = None
    pipeline: ScheduleName | None = None
    microbatches: int | None = None
    overlap: bool = True
    optimizer: str = "adamw"
    compile: bool = True
    python: str | None = None
    timeout: float = 180.0
    price: float | None = None
    mtbf: float | None = None
    restart: float | None = None
    storage_rate: float | None = None
    json: bool = False
    html: Path | None = None

    def check(self, **more: int | None) -> None:
        """Raises a `ConfigError` if a number is out of range, here or among other counts."""
        counts = {"batch-size": self.batch_size, "num-tokens": self.num_tokens, "minibatches": self.minibatches}
        counts["microbatches"] = self.microbatches
        for name, value in {**counts, **{name.replace("_", "-"): value for name, value in more.items()}}.items():
            if value is not None and value < 1:
                hint = f"pass a positive whole number, e.g. --{name} 8."
                raise ConfigError(f"--{name} must be at least 1; got {value}.", hint=hint)
        if not self.timeout > 0:
            hint = "pass a number of seconds, e.g. --timeout 180."
            raise ConfigError(f"--timeout must be greater than 0; got {self.timeout:g}.", hint=hint)
        if self.price is not None and not 0 <= self.price < math.inf:
            hint = "pass the price per device-hour in dollars, e.g. --price 2.5."
            raise ConfigError(f"--price must be finite and at least 0; got {self.price:g}.", hint=hint)
        self.reliability()
        self.dtypes()

    def dtypes(self) -> str | dict[str, Any]:
        """Returns the precision of a `Setup`; raises if an option for fp8 has no effect."""
        options = {name: getattr(self, f"fp8_{name}") for name in ("matmuls", "scaling", "least_dim")}
        Precision.with_fp8(self.precision, options)
        given = {name: value for name, value in options.items() if value is not None}
        return {"compute": "bfloat16", "fp8": given} if given else self.precision

    def reliability(self) -> Reliability | None:
        """Returns how often chips fail; None if no goodput was asked for. Raises if a number is out of range."""
        given = {"mtbf": self.mtbf, "restart": self.restart, "storage-rate": self.storage_rate}
        for name, value in given.items():
            least, most, unit, example = _RELIABILITY[name]
            if value is not None and not least <= value <= most:
                hint = f"pass a number of {unit}, e.g. --{name} {example}."
                raise ConfigError(f"--{name} must be from {least:g} to {most:g} {unit}; got {value:g}.", hint=hint)
        if self.mtbf is None:
            for name, value in (("restart", self.restart), ("storage-rate", self.storage_rate)):
                if value is not None:
                    hint = "pass the mean hours between two failures of one chip, e.g. --mtbf 50000."
                    raise ConfigError(f"--{name} has no effect without --mtbf.", hint=hint)
            return None
        rate = None if self.storage_rate is None else self.storage_rate * 2**30
        return Reliability(self.mtbf, RESTART_S if self.restart is None else self.restart, rate)
