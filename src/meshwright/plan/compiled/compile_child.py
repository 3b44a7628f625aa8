"""Process that `compile_step` starts: reads a request, compiles, and writes the result."""

from __future__ import annotations

import base64
import importlib.metadata
import json
import os
import pickle
import re
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax

from meshwright.errors import MeshwrightError
from meshwright.files import write_atomically
from meshwright.hardware.chips import multiplies_fp8
from meshwright.layout.leaf import format_bytes
from meshwright.loop.logging.memory_use import peak_resident
from meshwright.parallel.pipeline.named_schedules import check_rounds
from meshwright.plan.compiled.collectives import ProgramSchedule, read_schedule
from meshwright.plan.compiled.compile import PARENT, WIDENED, Compiled
from meshwright.plan.compiled.fp8_matmuls import check_fp8
from meshwright.plan.compiled.idle_ticks import without_idle
from meshwright.plan.compiled.topology import assumed_cudnn, mesh_on_target, require_compiler, stand_in_for_cudnn
from meshwright.plan.compiled.verdict import CompiledCollective, judge, timed_schedule
from meshwright.plan.costs.stages import Stages
from meshwright.plan.step_setup import Setup, build_step, step_options, with_schedule
from meshwright.plan.target import Target, parse_target
from meshwright.train.fine_tuning.lora import adapt_job
from meshwright.train.job import execution_of, model_of
from meshwright.train.jobs.job_loading import load_job
from meshwright.train.state import frozen_names
from meshwright.train.step import Step

_PACKAGES = ("jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin")


def main(asked: str, answered: str) -> None:
    """Compiles the request in the file `asked` and writes the result to `answered`."""
    request = json.loads(Path(asked).read_text())
    _watch_memory(request["memory_limit"], Path(answered))
    _watch_parent(os.environ.get(PARENT))
    target = parse_target(request["target"])
    try:
        require_compiler(target)
    except MeshwrightError as error:
        answer = _refusal(error, "missing")
    else:
        try:
            answer = _compile(request, target)
        except MeshwrightError as error:
            answer = _refusal(error, "refused")
        except Exception as error:  # compilers raise any type
            said = f"the compiler rejected the program: {type(error).__name__}: {_short(error)}"
            answer = {"error": said, "reason": "refused"}
    write_atomically(Path(answered), json.dumps(answer))


def _watch_parent(parent: str | None, *, seconds: float = 0.5) -> None:
    """Ends this process soon after the one that waits for it was killed: nobody would read the result."""

    def watch() -> None:
        while os.getppid() == int(parent or 0):
            time.sleep(seconds)
        os._exit(1)

    if parent is not None:
        threading.Thread(target=watch, daemon=True).start()


def _compile(request: dict[str, Any], target: Target) -> dict[str, Any]:
    setup = Setup.from_json(request["setup"])
    notes: list[str] = []
    # Otherwise a cached program could carry the operation names of a different one.
    jax.config.update("jax_compilation_cache_include_metadata_in_key", True)
    if target.platform == "cpu":
        jax.config.update("jax_num_cpu_devices", target.num_devices)
    mesh = mesh_on_target(target, setup.mesh)
    job = (
        load_job(request["reference"]) if "reference" in request else pickle.loads(base64.b64decode(request["pickle"]))
    )
    job = adapt_job(job, adapters=request.get("lora"))
    begin = time.perf_counter()
    step, batch = build_step(job, mesh, setup)
    if target.platform == "gpu":
        stand_in_for_cudnn()
        notes.append("a stand-in replaces cuDNN attention: its memory counts, but its matmuls hide nothing")
        with assumed_cudnn():
            lowered = step.lower(batch)
    else:
        lowered = step.lower(batch)
    traced = time.perf_counter()
    made: dict[str, Any] = {"target": target.name, "setup": setup, "trace_s": traced - begin, "versions": _versions()}
    try:
        compiled = lowered.compile()
    except Exception as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        made |= {"compile_s": time.perf_counter() - traced, "peak_rss_bytes": peak_resident()}
        return Compiled(**made, does_not_fit=_short(error), notes=tuple(notes)).to_json()
    seconds = time.perf_counter() - traced
    text = compiled.as_text()
    if request["text_path"] is not None:
        Path(request["text_path"]).write_text(text)
    schedule = _of_one_device(read_schedule(text, with_steps=True), step, with_schedule(job, setup))
    collectives = _judged(schedule, target, setup, step)
    memory, peak = _memory(compiled.memory_analysis(), target)
    if target.platform == "cpu" and setup.dtypes.compute.itemsize < 4:
        notes.append(WIDENED)
    fp8 = setup.dtypes.fp8
    params = step.layout.abstract.params
    names = () if fp8 is None else fp8.names(params)
    frozen = frozen_names(job, params)
    check = check_fp8(text, names, emulates=not multiplies_fp8(target.platform, target.chip), frozen=frozen)
    if fp8 is not None:
        notes += [check.line(), *check.warnings()]
    return Compiled(
        **made,
        peak_bytes=peak,
        memory=memory,
        collectives=collectives,
        num_matmuls=schedule.num_matmuls,
        matmuls=check.uses,
        estimated_cycles=schedule.estimated_cycles,
        compile_s=seconds,
        peak_rss_bytes=peak_resident(),
        notes=tuple(notes),
        steps=timed_schedule(schedule, target, setup.mesh, dtype=setup.dtypes.compute.name),
    ).to_json()


def _of_one_device(schedule: ProgramSchedule, step: Step, job: Any) -> ProgramSchedule:
    """Returns the schedule without the branches of a pipeline that a device does not take."""
    run, count = execution_of(job), dict(step.layout.mesh.shape).get("pp", 1)
    if run is None or count == 1 or step.view.view != "local":
        return schedule
    stages = Stages(
        count,
        run.num_microbatches or 2 * count,
        run.pipeline,
        check_rounds(run.pipeline, run.pipeline_rounds),
    )
    model = model_of(job)
    tied = model is not None and model.tied_embeddings
    return without_idle(
        schedule,
        busy=stages.microbatches * stages.rounds,
        ticks=stages.ticks,
        rounds=stages.rounds,
        ends="together" if stages.schedule == "zb-v" else "tied" if tied else "apart",
    )


def _judged(schedule: ProgramSchedule, target: Target, setup: Setup, step: Step) -> tuple[CompiledCollective, ...]:
    mesh = step.layout.mesh
    sizes, dtype = dict(mesh.shape), setup.dtypes.compute.name
    verdicts = judge(schedule, target, setup.mesh, dtype=dtype, options=step_options(mesh, setup, step.view.view))
    return tuple(
        CompiledCollective(
            c.kind, c.axes(sizes), c.bytes_moved, c.wire_bytes, c.group_size, c.is_async, c.matmuls_between, c.trips,
            c.source, c.flops_between, c.cycles_between, c.serves, c.line, c.merged,
            transfer_s=found.transfer_s, share=None if found.transfer_s is None else found.share, why=found.why,
        )
        for c, found in zip(schedule.collectives, verdicts, strict=True)
    )  # fmt: skip


def _memory(found: Any, target: Target) -> tuple[dict[str, int], int]:
    parts = ("argument", "output", "alias", "temp", "generated_code")
    memory = {name: int(getattr(found, f"{name}_size_in_bytes")) for name in parts}
    if target.platform == "cpu":
        # The CPU compiler's peak excludes temporaries.
        return memory, memory["argument"] + memory["output"] - memory["alias"] + memory["temp"]
    return memory, int(found.peak_memory_in_bytes)


def _watch_memory(limit: int, answered: Path) -> None:
    # An operating-system limit would count reserved addresses, far more than compilers use.
    def watch() -> None:
        while True:
            if (used := peak_resident()) > limit:
                said = f"compiling used {format_bytes(used)} of host memory; the limit is {format_bytes(limit)}."
                write_atomically(answered, json.dumps({"error": said, "reason": "memory"}))
                os._exit(1)
            time.sleep(0.1)

    threading.Thread(target=watch, daemon=True).start()


def _refusal(error: MeshwrightError, reason: str) -> dict[str, Any]:
    message = str(error).removesuffix(f"\nhint: {error.hint}")
    return {"error": message, "reason": reason, "hint": error.hint}


def _short(error: Exception) -> str:
    """Returns the first lines of an error; XLA appends the whole program."""
    text = re.sub(r"\s*\n\s*", "\n", str(error).strip())
    lines = text.splitlines()[:6]
    return "\n".join(line[:400] for line in lines)


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
