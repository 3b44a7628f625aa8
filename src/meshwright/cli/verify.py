"""`meshwright verify`: compares a job's step on meshes with its step on one device."""

from __future__ import annotations

import sys
from typing import Annotated, Any, Literal

import tyro

from meshwright.cli import show, simulate_devices
from meshwright.errors import MeshError
from meshwright.train.job import job_errors, load_job


def verify(
    job: Annotated[str, tyro.conf.Positional],
    /,
    mesh: tuple[str, ...] = (),
    view: Literal["auto", "global", "local", "both"] = "auto",
    minibatches: tuple[int, ...] = (1,),
    steps: int = 3,
    tolerance: float = 1e-5,
    precision: str = "float32",
    seed: int = 0,
    devices: int | None = None,
    json: bool = False,
) -> int:
    """Compare a job's step on meshes with its step on one device; exit with 1 and the likely cause if they differ.

    Compares initial parameters bit for bit, loss, gradients, and parameters after a few SGD steps. Without an
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
        tolerance: largest allowed relative error.
        precision: compute precision: float32, mixed or bfloat16.
        seed: seed for the parameters, and for the batch if the job has only shapes.
        devices: number of devices to use; all if omitted.
        json: print the report as JSON.
    """
    if devices is not None and devices < 2:
        raise MeshError(f"cannot compare {devices} devices with one.", hint="use at least 2.")
    simulate_devices(devices or 8)  # before importing the job, which may use JAX
    from meshwright.verify import verify as compare

    loaded = load_job(job)
    views: Any = {"auto": None, "both": ("global", "local")}.get(view, view)
    with job_errors(loaded, job):
        report = compare(
            loaded,
            meshes="all" if mesh == ("all",) else mesh or None,
            views=views,
            num_minibatches=minibatches,
            num_steps=steps,
            tolerance=tolerance,
            precision=precision,
            seed=seed,
            devices=devices,
            progress=lambda line: print(f"comparing {line}", file=sys.stderr, flush=True),
        )
    if json:
        print(report.to_json())
    else:
        show(report)
    return 0 if report.ok else 1
