"""Train step of a 7B decoder, compiled ahead of time for hardware you don't have.

    python benchmarks/train_step_aot.py --targets v5p:4x4x4 h200:8x8
    python benchmarks/train_step_aot.py --compile-time

For each mesh and form of the step: bytes sent per device along each mesh axis over the least possible, collectives
hidden behind a matmul (by count and by bytes), peak memory, and compile time. `jit` is the same model in the global
view, partitioned by XLA from the same layout. Needs the `tpu` or `gpu` extra and optax; no hardware is used or timed.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import optax

import meshwright as mw
from meshwright.models import Decoder, Execution
from meshwright.parallel.overlap.forms import overlap_options
from meshwright.plan.compiled.collectives import ProgramSchedule, read_schedule
from meshwright.plan.compiled.topology import can_compile_for, target_mesh
from meshwright.train.jobs.language_job import language_job
from meshwright.train.precision import Precision
from meshwright.train.state import state_layout
from meshwright.train.step import make_train_step

TOKENS = 4096
# Parameters, gradients and activations are all sent in bfloat16.
WIRE_BYTES = 2
BFLOAT16 = Precision(compute="bfloat16", reduce="bfloat16")


@dataclass(frozen=True)
class Case:
    """One form of the step."""

    remat: str = "full"
    run: dict[str, Any] = field(default_factory=dict)
    view: str = "local"
    tuned: bool = True


CASES = {
    "ours": Case(run={"layers": "scan", "save_gathered": True}),
    "ours, rows kept": Case(remat="dots", run={"layers": "scan", "save_gathered": True}),
    "ours, written out": Case(run={"layers": "unroll", "save_gathered": True}),
    "jit": Case(view="global", run={"layers": "scan", "tensor_axis": None}, tuned=False),
}
MESHES = {"v5p": ("fsdp:64", "fsdp:16,tp:4"), "h200": ("fsdp:64", "fsdp:8,tp:8")}


def floor_bytes(
    model: Decoder, sizes: dict[str, int], rows: int, num_tokens: int, wire_bytes: int = WIRE_BYTES
) -> dict[str, float]:
    """Returns the least bytes that a device must send along each axis per step."""
    fsdp, tp = sizes.get("fsdp", 1), sizes.get("tp", 1)
    attention = 4 * model.d_model * model.num_heads * (model.head_dim or model.d_model // model.num_heads)
    layers = model.num_layers * (attention + 3 * model.d_model * model.d_ff)
    ends = 2 * model.vocab_size * model.d_model  # the embedding and the head
    # FSDP: three transfers per layer (gather forward, gather backward, scatter the gradient), two for embedding and
    # head, which are gathered once. Dims split by tp are not gathered.
    weights = (3 * layers + 2 * ends) / tp * wire_bytes * (fsdp - 1) / fsdp
    # TP with sequence parallelism: two blocks per layer gather rows and scatter sums in both passes: eight transfers of
    # [rows, tokens, d_model]. The ends have four: the embedding's scatter and the loss's gather, with their gradients.
    activations = (8 * model.num_layers + 4) * rows * num_tokens * model.d_model * wire_bytes * (tp - 1) / tp
    return {"fsdp": weights, "tp": activations}


def compile_step(
    model: Decoder,
    mesh: Any,
    case: Case,
    *,
    rows: int,
    num_tokens: int,
    options: dict[str, Any],
    precision: Precision = BFLOAT16,
    save_to: str | None = None,
) -> tuple[ProgramSchedule, Any, float]:
    sizes = dict(mesh.shape)
    data_ways = sizes.get("fsdp", 1) * sizes.get("dp", 1)
    # Compiling for cuDNN needs cuDNN; XLA's attention also has no collectives, but needs more memory.
    run = Execution(attention="xla", **case.run)
    job = language_job(model, batch_size=rows * data_ways, num_tokens=num_tokens, run=run)
    optimizer = optax.adamw(3e-4)
    layout = state_layout(job, optimizer, mesh)
    tuned = overlap_options(mesh, written_out=case.run["layers"] == "unroll") if case.tuned else {}
    step = make_train_step(
        job,
        optimizer,
        layout,
        view=case.view,  # type: ignore[arg-type]
        precision=precision,
        remat=case.remat,  # type: ignore[arg-type]
        clip=1.0,
        overlap=False,  # the case sets these options
        compiler_options=tuned | options or None,
    )
    begin = time.perf_counter()
    compiled = step.lower(job.batch).compile()
    seconds = time.perf_counter() - begin
    if save_to is not None:
        Path(save_to).write_text(compiled.as_text())
    return read_schedule(compiled.as_text()), compiled.memory_analysis(), seconds


def describe(schedule: ProgramSchedule, sizes: dict[str, int], floors: dict[str, float]) -> dict[str, Any]:
    bytes_by_axis: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    for collective in schedule.collectives:
        axes = "+".join(collective.axes(sizes))
        bytes_by_axis[axes] += collective.trips * collective.wire_bytes
        kinds[f"{axes} {collective.kind}"] += collective.trips
    return {
        "gib": {axes: round(count / 2**30, 3) for axes, count in bytes_by_axis.items()},
        "over_floor": {
            axis: round(bytes_by_axis[axis] / floor, 3) for axis, floor in floors.items() if sizes.get(axis, 1) > 1
        },
        "hidden": f"{schedule.num_hidden}/{schedule.count()}",
        "hidden_bytes": round(schedule.hidden_bytes / schedule.wire_bytes, 3) if schedule.wire_bytes else None,
        "collectives": dict(sorted(kinds.items())),
    }


def mesh_of(target: str, text: str) -> Any:
    parts = [part.split(":") for part in text.split(",")]
    return target_mesh(target, [int(size) for _, size in parts], [name for name, _ in parts])


def measure_steps(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for target in arguments.targets:
        if not can_compile_for(target):
            print(f"{target}: its compiler is not installed")
            continue
        for text in arguments.meshes or MESHES[target.partition(":")[0]]:
            for name, case in CASES.items():
                # Only tp gathers rows, and only GPUs gain from unrolled layers.
                idle = ("kept" in name and "tp" not in text) or ("out" in name and not target.startswith("h200"))
                if idle or (arguments.only and name not in arguments.only):
                    continue
                changes = {"num_layers": arguments.num_layers} if arguments.num_layers else {}
                model = Decoder.named(arguments.size, **changes)
                case = replace(case, tuned=case.tuned and not arguments.untuned)
                mesh = mesh_of(target, text)
                sizes = dict(mesh.shape)
                pairs = (option.split("=", 1) for option in arguments.option)
                options = {name: {"True": True, "False": False}.get(value, value) for name, value in pairs}
                schedule, memory, seconds = compile_step(
                    model,
                    mesh,
                    case,
                    rows=arguments.rows,
                    num_tokens=TOKENS,
                    options=options,
                    save_to=arguments.save_to,
                )
                floors = floor_bytes(model, sizes, arguments.rows, TOKENS)
                row = {"target": target, "mesh": text, "form": name, **describe(schedule, sizes, floors)}
                row |= {"peak_gib": round(memory.peak_memory_in_bytes / 2**30, 2), "compile_s": round(seconds)}
                rows.append(row)
                if not arguments.json:
                    print(json.dumps(row), flush=True)
    return rows


def measure_compile_time(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns compile seconds of 64 scanned layers over 4, for simulated devices and for the targets."""
    rows = []
    for target in ["cpu", *arguments.targets]:
        if target != "cpu" and not can_compile_for(target):
            continue
        kind = target.partition(":")[0]
        mesh = mw.create_mesh("fsdp:4,tp:2") if target == "cpu" else mesh_of(target, MESHES[kind][1])
        seconds = {}
        for num_layers in (4, 64):
            model = Decoder.named("tiny", num_layers=num_layers, d_model=256, d_ff=512, vocab_size=512)
            taken = [
                compile_step(model, mesh, CASES["ours"], rows=1, num_tokens=256, options={})[2]
                for _ in range(arguments.repeats)
            ]
            seconds[num_layers] = min(taken)
        row = {"target": target, "seconds": seconds, "ratio": round(seconds[64] / seconds[4], 2)}
        rows.append(row)
        if not arguments.json:
            print(json.dumps(row), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="*", default=["v5p:4x4x4", "h200:8x8"])
    parser.add_argument(
        "--meshes", nargs="*", default=[], help="such as fsdp:64 fsdp:16,tp:4 (default: two per target)"
    )
    parser.add_argument("--only", nargs="*", default=[], choices=list(CASES), help="forms to compile")
    parser.add_argument("--size", default="7b")
    parser.add_argument("--num-layers", type=int)
    parser.add_argument("--rows", type=int, default=1, help="rows per data-parallel device (default: 1)")
    parser.add_argument("--untuned", action="store_true", help="leave out the compiler options that hide collectives")
    parser.add_argument("--option", nargs="*", default=[], help="additional compiler options: name=value")
    parser.add_argument("--save-to", help="file for the text of the last compiled program")
    parser.add_argument("--compile-time", action="store_true")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.compile_time:
        jax.config.update("jax_num_cpu_devices", 8)
    rows = measure_compile_time(arguments) if arguments.compile_time else measure_steps(arguments)
    if arguments.json:
        print(json.dumps({"jax": jax.__version__, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
