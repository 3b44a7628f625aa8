"""Matmuls of fp8 train steps compiled for H200s: fails if one of a projection does not run in fp8. No GPU is needed.

    python benchmarks/fp8_programs.py                    # needs JAX's CUDA plugin; ten to twenty minutes on two cores
    python benchmarks/fp8_programs.py --only "pp:2, 1f1b"

On a CPU, tests see fp8 emulated, so they cannot see what XLA:GPU does to casts and slices. The model is a decoder of
four layers of 512 features, or an xLSTM of 1024.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import optax
from measure import table, verdict, versions

from meshwright.mesh.string import parse_mesh
from meshwright.models import XLSTM, Decoder, Execution
from meshwright.plan.compiled.fp8_matmuls import Fp8Check, check_fp8
from meshwright.plan.compiled.topology import assumed_cudnn, mesh_on_target
from meshwright.train import Fp8, Precision, language_job, make_train_step, state_layout

DECODER = Decoder(vocab_size=1024, num_layers=4, d_model=512, num_heads=4, d_ff=1024)
MLSTM = XLSTM(vocab_size=1024, num_layers=4, d_model=1024, num_heads=4, d_ff=1024)


@dataclass(frozen=True)
class Program:
    """A step to compile.

    Args:
        run: fields of `Execution`.
        options: of `make_train_step`.
    """

    mesh: str
    num_minibatches: int = 4
    run: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    model: Any = DECODER


def pipeline(name: str, mesh: str = "pp:2") -> Program:
    return Program(mesh, 1, {"pipeline": name, "num_microbatches": 4}, {"view": "local"})


LOCAL = {"view": "local"}
PROGRAMS = {
    "dp:1, unrolled": Program("dp:1", run={"layers": "unroll"}),
    "dp:1, scanned": Program("dp:1", run={"layers": "scan"}),
    "dp:1, unrolled, remat dots": Program("dp:1", run={"layers": "unroll"}, options={"remat": "dots"}),
    "dp:1, unrolled, remat full": Program("dp:1", run={"layers": "unroll"}, options={"remat": "full"}),
    "dp:1, without kernels": Program("dp:1", run={"layers": "unroll", "kernels": False}),
    "dp:1, two layers per loop step": Program("dp:1", run={"layers": 2}),
    "dp:1, two layers per loop step, one minibatch": Program("dp:1", 1, {"layers": 2}),
    "dp:8": Program("dp:8", options=LOCAL),
    "fsdp:8": Program("fsdp:8", options=LOCAL),
    "fsdp:8, one minibatch": Program("fsdp:8", 1, options=LOCAL),
    "fsdp:8, global view": Program("fsdp:8", options={"view": "global"}),
    "fsdp:8, once": Program("fsdp:8", options={**LOCAL, "sync": "once"}),
    "fsdp:8, unrolled": Program("fsdp:8", run={"layers": "unroll"}, options=LOCAL),
    "fsdp:8, two layers per loop step, one minibatch": Program("fsdp:8", 1, {"layers": 2}, LOCAL),
    "tp:2": Program("tp:2", options=LOCAL),
    "tp:2, no sequence parallelism": Program("tp:2", run={"sequence_parallel": False}, options=LOCAL),
    "fsdp:4,tp:2": Program("fsdp:4,tp:2", options=LOCAL),
    **{f"pp:2, {name}": pipeline(name) for name in ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-v")},
    "pp:2,tp:2, 1f1b": pipeline("1f1b", "pp:2,tp:2"),
    "dp:1, xLSTM": Program("dp:1", model=MLSTM),
}


def compile_program(program: Program) -> tuple[Fp8Check, int]:
    """Returns the matmuls of a program, and its peak memory in bytes."""
    devices = math.prod(parse_mesh(program.mesh).sizes)
    mesh, optimizer = mesh_on_target(f"h200:1x{devices}", program.mesh), optax.adamw(1e-4)
    run = Execution(**program.run)
    job = language_job(program.model, batch_size=8 * devices, num_tokens=512, run=run)
    fp8 = Fp8()
    precision = Precision(compute="bfloat16", fp8=fp8)
    layout = state_layout(job, optimizer, mesh, precision=precision)
    options: dict[str, Any] = {**program.options, "num_minibatches": program.num_minibatches}
    with assumed_cudnn():
        step = make_train_step(job, optimizer, layout, precision=precision, clip=1.0, **options)
        compiled = step.lower(job.batch).compile()
    check = check_fp8(compiled.as_text(), fp8.names(layout.abstract.params))
    return check, compiled.memory_analysis().peak_memory_in_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PROGRAMS, default=list(PROGRAMS), help="programs (default: all)")
    lines, wrong = [], []
    for name in parser.parse_args().only:
        check, peak = compile_program(PROGRAMS[name])
        fast = any(use.role == "weight gradient" and not use.is_precise for use in check.uses)
        warnings = [*check.warnings(), *(["a weight gradient has fast accumulation"] if fast else [])]
        wrong += [name] if warnings else []
        lines.append([name, check.line(), f"{peak / 2**30:.3f}"])
        print(f"{name}: {check.line()}", *warnings, sep="\n  ", file=sys.stderr, flush=True)
    print(f"compiled for H200s; {versions('jax', 'optax')}")
    print(table(["program", "matmuls", "peak GiB"], lines))
    print(verdict(f"all projections in fp8{', but ' + ', '.join(wrong) if wrong else ''}", not wrong))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
