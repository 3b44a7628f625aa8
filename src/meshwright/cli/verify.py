"""`meshwright verify`: compares a job's step on meshes with its step on one device."""

from __future__ import annotations

import sys
from typing import Annotated, Any, Literal

import tyro

from meshwright.cli import show, simulate_devices
from meshwright.errors import ConfigError, JobError, MeshError
from meshwright.parallel.pipeline.named_schedules import ScheduleName
from meshwright.train.fine_tuning.lora import adapt_job
from meshwright.train.jobs.job_loading import job_errors, load_job
from meshwright.train.jobs.language_job import with_execution


def verify(
    job: Annotated[str, tyro.conf.Positional],
    /,
    mesh: tuple[str, ...] = (),
    view: Literal["auto", "global", "local", "both"] = "auto",
    minibatches: tuple[int, ...] = (1,),
    steps: int = 3,
    tolerance: float | None = None,
    precision: str = "float32",
    remat: Literal["none", "dots", "full", "offload"] = "none",
    sync: Literal["auto", "every", "hybrid", "once"] = "auto",
    pipeline: ScheduleName | None = None,
    pipeline_rounds: int | None = None,
    microbatches: int | None = None,
    mask: int | None = None,
    freeze: tuple[str, ...] = (),
    train: tuple[str, ...] = (),
    lora: str | None = None,
    pad: tuple[str, ...] = (),
    seed: int = 0,
    devices: int | None = None,
    fuzz: int | None = None,
    seconds: float | None = None,
    inspect: bool = True,
    json: bool = False,
) -> int:
    """Compare a job's step on meshes with its step on one device; exit with 1 and the likely cause if they differ.

    Compares initial parameters bit for bit, loss, gradients, metrics, and parameters after a few SGD steps. Without an
    accelerator, it simulates eight devices.

    Args:
        job: module:attribute or file.py:attribute.
        mesh: meshes such as "dp:2,tp:4", or "all" for every way to split the devices over the axes of the job's rules.
            If omitted, the job's mesh, or else each axis alone.
        view: global: XLA inserts the collectives; local: the loss and
            Meshwright layers do; both: compare each view; auto: both, but the local view only on meshes whose axes the
            loss communicates over.
        minibatches: numbers of minibatches to compare.
        steps: number of SGD steps.
        tolerance: largest allowed relative error (default: 1e-5 in float32, 0.125 in fp8, 2e-2 otherwise).
        precision: compute precision: float32, mixed, bfloat16 or fp8.
        remat: activations to recompute in the backward pass: none, dots, full or offload.
        sync: how often devices exchange gradients in the local view: every, hybrid or once (default: hybrid).
        pipeline: schedule on meshes with a pp axis: gpipe, circular, 1f1b, aligned-1f1b, interleaved-1f1b,
            zb-h1 or zb-v (default: the job's).
        pipeline_rounds: stages per device with interleaved-1f1b and circular (default: 2).
        microbatches: number of microbatches in a pipeline (default: the job's, or twice the number of stages).
        mask: seed for random masks or weights, in place of those of the batch.
        freeze: regexes of parameters to freeze, as for `train`.
        train: regexes; if given, freeze all parameters without a match.
        lora: low-rank adapters to train, as for `train`: rank=16,alpha=32,targets=REGEX,base=int8.
        pad: regexes of parameters whose indivisible dims may be padded with zeros.
        seed: seed for the parameters, and for the batch if the job has only shapes; with --fuzz, for the cases.
        devices: number of devices to use; all if omitted.
        fuzz: number of random meshes and options to compare, instead of those above; prints the smallest failing case.
        seconds: time limit of --fuzz, in seconds (default: none).
        inspect: report arrays that XLA replicates or gathers in the global view, with their source lines.
        json: print the report as JSON.
    """
    if devices is not None and devices < 2:
        raise MeshError(f"cannot compare {devices} devices with one.", hint="use at least 2.")
    simulate_devices(devices or 8)  # before importing the job, which may use JAX
    from meshwright.verify import fuzz as fuzz_job
    from meshwright.verify import verify as compare
    from meshwright.verify.example_batch import example_batch
    from meshwright.verify.fuzz import TOLERANCES
    from meshwright.verify.random_masks import mask_names, with_random_masks

    def progress(line: str) -> None:
        print(f"comparing {line}", file=sys.stderr, flush=True)

    changes = {"pipeline": pipeline, "pipeline_rounds": pipeline_rounds, "num_microbatches": microbatches}
    changes = {name: value for name, value in changes.items() if value is not None}
    loaded = load_job(job)
    if changes:
        if mesh not in ((), ("all",)) and not any("pp" in text for text in mesh):
            raise ConfigError(
                "--pipeline, --pipeline-rounds and --microbatches would have no effect: no mesh has a pp axis.",
                hint="leave them out, or compare e.g. --mesh pp:2,dp:4.",
            )
        if view in ("global", "both"):
            raise ConfigError(
                "--pipeline, --pipeline-rounds and --microbatches would have no effect in the global view, in which "
                "XLA runs no pipeline.",
                hint="leave out --view.",
            )
        view = "local"  # the other view would equal one device whatever the schedule does
        loaded = with_execution(loaded, **changes)
    loaded = adapt_job(loaded, freeze=freeze, train=train, adapters=lora)
    if fuzz is not None:
        given = {
            "--mesh": mesh != (),
            "--view": view != "auto",
            "--minibatches": minibatches != (1,),
            "--steps": steps != 3,
            "--tolerance": tolerance is not None,
            "--precision": precision != "float32",
            "--remat": remat != "none",
            "--sync": sync != "auto",
            "--mask": mask is not None,
            "--pad": pad != (),
            "--json": json,
        }
        without_effect = [option for option, is_set in given.items() if is_set]
        if without_effect:
            raise ConfigError(
                f"--fuzz draws its own cases, so {', '.join(without_effect)} would have no effect.",
                hint="leave it out, or leave out --fuzz.",
            )
        with job_errors(loaded, job):
            found = fuzz_job(loaded, fuzz, seconds=seconds, seed=seed, devices=devices, name=job, progress=progress)
        print(f"{found.table()}\n{found}")
        return 0 if found.ok else 1
    if seconds is not None:
        raise ConfigError("--seconds limits --fuzz, which is not set.", hint="leave it out, or add --fuzz 20.")
    views: Any = {"auto": None, "both": ("global", "local")}.get(view, view)
    with job_errors(loaded, job):
        batch = None
        if mask is not None:
            batch = example_batch(loaded, seed=seed)
            if not mask_names(batch):
                raise JobError("--mask: the batch has no mask or weights.", hint="leave --mask out.")
            batch = with_random_masks(batch, mask)
        report = compare(
            loaded,
            batch=batch,
            sync=None if sync == "auto" else sync,
            remat=remat,
            meshes="all" if mesh == ("all",) else mesh or None,
            views=views,
            num_minibatches=minibatches,
            num_steps=steps,
            tolerance=TOLERANCES.get(precision, 1e-5) if tolerance is None else tolerance,
            precision=precision,
            seed=seed,
            pad=pad or False,
            devices=devices,
            inspect=inspect,
            progress=progress,
        )
    if json:
        print(report.to_json())
    else:
        show(report)
    return 0 if report.ok else 1
