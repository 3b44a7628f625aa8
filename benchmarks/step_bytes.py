"""Memory traffic of train steps compiled for one H200, beside the figures recorded below; no GPU is needed.

    python benchmarks/step_bytes.py                    # needs JAX's CUDA plugin; about two minutes
    python benchmarks/step_bytes.py --only bf16 xlstm

A change of a step that nobody can time shows here: what the kernels read and write, and the peak of memory. Steps have
the sizes of the timed ones (decoder_h200.py, fp8_h200.py, mlstm_h200.py) with two layers. Attention counts its inputs
and outputs.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import optax
from measure import table, verdict, versions
from traffic import kernels_of

from meshwright.models import XLSTM, Decoder, Execution
from meshwright.plan.compiled.topology import assumed_cudnn, mesh_on_target
from meshwright.train import language_job, make_train_step, state_layout

DECODER = Decoder(vocab_size=32768, num_layers=2, d_model=2048, num_heads=16, d_ff=5632)
MLSTM = XLSTM(vocab_size=50304, num_layers=2, d_model=2048, num_heads=4, d_ff=5504)
MORE = 0.005
"""Share by which a figure may be above the recorded one."""


@dataclass(frozen=True)
class Step:
    """A step to compile, with figures recorded with jax 0.11.2.

    Args:
        matmuls, others: GB that matmuls and all other kernels move; in a loop over minibatches, once.
        peak: GiB of memory.
    """

    model: Any
    rows: int
    tokens: int
    matmuls: float
    others: float
    peak: float
    precision: str = "mixed"
    num_minibatches: int = 1


STEPS = {
    "bf16": Step(DECODER, 16, 2048, matmuls=19.629, others=29.970, peak=8.690),
    "bf16, 4 minibatches": Step(DECODER, 64, 2048, num_minibatches=4, matmuls=19.629, others=34.235, peak=9.574),
    "bf16 long": Step(DECODER, 4, 8192, matmuls=19.629, others=30.000, peak=8.695),
    "fp8": Step(DECODER, 16, 2048, precision="fp8", matmuls=14.256, others=39.656, peak=8.148),
    "xlstm": Step(MLSTM, 4, 8192, matmuls=22.267, others=36.249, peak=9.881),
}


def compile_step(step: Step) -> Any:
    """Returns the step of a run with AdamW and clipping, compiled for one H200."""
    mesh, optimizer = mesh_on_target("h200:1x1", "dp:1"), optax.adamw(1e-4)
    run = Execution(layers="unroll", attention="cudnn")
    job = language_job(step.model, batch_size=step.rows, num_tokens=step.tokens, run=run)
    layout = state_layout(job, optimizer, mesh, precision=step.precision)
    options: dict[str, Any] = {"precision": step.precision, "num_minibatches": step.num_minibatches, "clip": 1.0}
    with assumed_cudnn():
        return make_train_step(job, optimizer, layout, **options).lower(job.make_batch(0)).compile()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=STEPS, default=list(STEPS), help="steps to compile (default: all)")
    lines, more = [], []
    for name in parser.parse_args().only:
        step = STEPS[name]
        program = compile_step(step)
        kernels = kernels_of(program.as_text())
        found = {
            "matmuls": sum(kernel.moved for kernel in kernels if kernel.is_matmul) / 1e9,
            "others": sum(kernel.moved for kernel in kernels if not kernel.is_matmul) / 1e9,
            "peak": program.memory_analysis().peak_memory_in_bytes / 2**30,
        }
        more += [f"{name}, {part}" for part, value in found.items() if value > getattr(step, part) * (1 + MORE)]
        figures = [f"{value:.3f} ({value / getattr(step, part):.3f}x)" for part, value in found.items()]
        lines.append([name, str(len(kernels)), *figures])
    print(f"compiled for an H200; {versions('jax', 'optax')}; in brackets: over the recorded figure")
    print(table(["step", "kernels", "GB of matmuls", "GB of others", "peak GiB"], lines))
    but = f", but {'; '.join(more)}" if more else ""
    print(verdict(f"at most {MORE:.1%} above the recorded figures{but}", not more))


if __name__ == "__main__":
    main()
