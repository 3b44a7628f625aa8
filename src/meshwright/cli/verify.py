"""`meshwright verify`: is a job's step on a mesh the same function as on one device?"""

from __future__ import annotations

import contextlib
import sys
from typing import Annotated, Any, Literal

import jax
import tyro

from meshwright.cli import show
from meshwright.errors import MeshError
from meshwright.train.job import job_errors, load_job


def verify(
    job: Annotated[str, tyro.conf.Positional],
    /,
    mesh: tuple[str, ...] = (),
    view: Literal["global", "local", "both"] = "both",
    minibatches: tuple[int, ...] = (1,),
    steps: int = 3,
    tolerance: float = 1e-5,
    precision: str = "float32",
    seed: int = 0,
    devices: int | None = None,
    json: bool = False,
) -> int:
    """Compare a job's step on meshes with its step on one device; exits with 1 where they differ, and says why.

    Compared are initial parameters bit for bit, loss, gradients, and parameters after some steps of SGD. Without an
    accelerator, eight devices are simulated.

    Args:
        job: module:attribute, or file.py:attribute.
        mesh: meshes such as "dp:2,tp:4", or "all" for every way to split the devices over the axes that the job's rules
            know. The job's own mesh when left out, or else each axis alone.
        view: who communicates: XLA (global), the loss itself (local), or one after the other (both).
        minibatches: numbers of minibatches to compute the batch in.
        steps: how many steps to take.
        tolerance: the largest relative error that is fine.
        precision: what the step computes in: float32, mixed or bfloat16.
        seed: for parameters, and for a batch where the job has shapes only.
        devices: how many devices to use; all by default.
        json: print the report as JSON.
    """
    if devices is not None and devices < 2:
        raise MeshError(f"{devices} devices cannot be compared with one.", hint="2 or more; all by default.")
    with contextlib.suppress(RuntimeError):  # JAX may already be running, with the devices it has
        # Only the CPU backend reads this. It comes before the job's module, which may use JAX.
        jax.config.update("jax_num_cpu_devices", devices or 8)
    from meshwright.verify import verify as compare

    loaded = load_job(job)
    views: Any = ("global", "local") if view == "both" else view
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
