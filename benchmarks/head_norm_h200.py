"""Head norm and output gate of an mLSTM: kernels and XLA's form, in bytes, in time, and in a train step on one GPU.

    PYTHONPATH=src python3 benchmarks/head_norm_h200.py --bytes      # compiled for an H200; needs JAX's CUDA plugin
    PYTHONPATH=src python3 benchmarks/head_norm_h200.py --steps 8    # one GPU, about two minutes
    PYTHONPATH=src python3 benchmarks/head_norm_h200.py --tiny       # small shapes, on a CPU as well

`--bytes` compiles a train step of the 813M xLSTM with two layers, and counts what the kernels of each part of a layer
read and write in its text. Otherwise the script compares values with float32, and times the norm with its gradient
(medians over rounds in a drawn order); `--steps` adds train steps of the whole model. Both forms also return the dot
products of the heads with their gradients, which the gradient of the cell needs.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import random
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from measure import machine, table, versions
from traffic import kernels_of

import meshwright as mw
from meshwright.models import XLSTM, Execution, mlstm_chunks
from meshwright.parallel.kernels import head_norm_kernel
from meshwright.parallel.kernels.head_norm_kernel import gated_head_norm, head_norm_forward, head_norm_gradient
from meshwright.plan.compiled.topology import mesh_on_target
from meshwright.train import init_state, language_job, make_train_step, state_layout

# B, S, H, V: the step below, "7b", "125m", and one that does not fill blocks
SHAPES = [(4, 8192, 4, 512), (4, 8192, 8, 512), (4, 8192, 4, 192), (3, 4099, 4, 256)]
TINY_SHAPES = [(2, 35, 2, 64)]
MODEL = {"vocab_size": 50304, "num_layers": 12, "d_model": 2048, "num_heads": 4, "d_ff": 5504}
TINY_MODEL = {"vocab_size": 128, "num_layers": 1, "d_model": 64, "num_heads": 2, "d_ff": 64}
EPS = 0.1  # so large that a sum of gradients in float32 shows it: nothing else of the dot products does not cancel
ALLOWED = 8e-3
"""Two roundings to bfloat16, of the largest element."""
NAMES = ("y", "h", "gate", "scale", "dots")
FORMS = ("XLA", "kernels")


def main() -> None:
    args = arguments()
    if args.bytes:
        count(args)
        return
    print(f"{jax.devices()[0].device_kind}; {machine()}; {versions('jax', 'jaxlib')}", flush=True)
    far, lines = [], []
    for shape in TINY_SHAPES if args.tiny else [SHAPES[number] for number in args.shapes]:
        given = inputs(shape)
        programs = {(form, what): program(form, what) for form in FORMS for what in ("forward", "both")}
        true = program("XLA", "both")(*(x.astype(jnp.float32) for x in given))
        for form in FORMS:
            found = [largest_difference(*pair) for pair in zip(programs[form, "both"](*given), true, strict=True)]
            text = " ".join(f"{name} {value:.1e}" for name, value in zip(NAMES, found, strict=True))
            print(f"{shape}, {form}, against float32: {text} ({ALLOWED:.0e} allowed)", flush=True)
            # XLA's dot products are sums of rounded gradients, in which nearly all cancels.
            few = found[: None if form == "kernels" else 4]
            far += [f"{form} of {shape}"] if not max(few) <= ALLOWED else []
        times = measure(programs, given, args)
        for form in FORMS:
            cells = [f"{statistics.median(times[form, what]) * 1e3:.0f}" for what in ("forward", "both")]
            spread = [f"{min(times[form, what]) * 1e3:.0f}-{max(times[form, what]) * 1e3:.0f}" for what in ("both",)]
            lines.append([", ".join(map(str, shape)), form, *cells, *spread])
    print(f"medians of {args.rounds} rounds of {args.inner} calls, bfloat16, us")
    print(table(["B, S, H, V", "form", "forward", "with gradient", "range"], lines), flush=True)
    if args.steps:
        time_steps(args)
    if far:
        sys.exit(f"error: {', '.join(far)}.")


# --- The norm alone ---


def inputs(shape: tuple[int, ...]) -> tuple[Any, ...]:
    """Returns h, the gate, the scale, and the gradient of the result."""
    rows, length, heads, features = shape

    @jax.jit
    def draw(key: Any) -> Any:
        keys = jax.random.split(key, 4)
        h = jax.random.normal(keys[0], shape, jnp.bfloat16)
        gate, d_y = (jax.random.normal(key, (rows, length, heads * features), jnp.bfloat16) for key in keys[1:3])
        return h, gate, 1 + jax.random.normal(keys[3], (heads * features,)), d_y

    return tuple(jax.block_until_ready(draw(jax.random.key(0))))


def program(form: str, what: str) -> Any:
    """Returns a program that returns the norm, and with "both" also the three gradients and the dot products."""

    def plain(h: Any, gate: Any, scale: Any, d_y: Any) -> Any:
        y, pull = jax.vjp(lambda *given: gated_head_norm(*given, eps=EPS, kernels=False), h, gate, scale)
        if what == "forward":
            return y
        d_h, *others = pull(d_y)
        return y, d_h, *others, jnp.sum(d_h.astype(jnp.float32) * h.astype(jnp.float32), axis=-1)

    def with_kernels(h: Any, gate: Any, scale: Any, d_y: Any) -> Any:
        y = head_norm_forward(EPS, h, gate, scale)
        return y if what == "forward" else (y, *head_norm_gradient(EPS, h, gate, scale, d_y))

    return jax.jit(plain if form == "XLA" else with_kernels)


@jax.jit
def _difference(got: Any, true: Any) -> Any:
    got, true = got.astype(jnp.float32), true.astype(jnp.float32)
    return jnp.max(jnp.abs(got - true)) / jnp.max(jnp.abs(true))


def largest_difference(got: Any, true: Any) -> float:
    return float(_difference(got, true))


def measure(programs: dict[Any, Any], given: Any, args: argparse.Namespace) -> dict[Any, list[float]]:
    """Returns milliseconds per call of each program."""
    for one in programs.values():
        jax.block_until_ready(one(*given))
    times: dict[Any, list[float]] = {key: [] for key in programs}
    order = list(programs)
    for number in range(args.rounds):
        random.Random(number).shuffle(order)
        for key in order:
            start = time.perf_counter()
            for _ in range(args.inner):
                out = programs[key](*given)
            jax.block_until_ready(out)
            times[key].append((time.perf_counter() - start) / args.inner * 1e3)
    return times


# --- Train steps ---


@contextlib.contextmanager
def norm_by(form: str) -> Iterator[None]:
    """Traces the model with XLA's form of the norm, or with the kernels if they fit."""
    with contextlib.ExitStack() as stack:
        for module in (mlstm_chunks, head_norm_kernel) if form == "XLA" else ():
            stack.enter_context(mock.patch.object(module, "fits_heads", return_value=False))
        yield
    jax.clear_caches()


def lowered_step(form: str, mesh: Any, args: argparse.Namespace, **changes: Any) -> tuple[Any, ...]:
    import optax

    rows, length = (2, 40) if args.tiny else (4, 8192)
    model, optimizer = XLSTM(**((TINY_MODEL if args.tiny else MODEL) | changes)), optax.adamw(1e-4)
    job = language_job(model, batch_size=rows, num_tokens=length, run=Execution(layers="unroll"))
    layout = state_layout(job, optimizer, mesh)
    step = make_train_step(job, optimizer, layout, precision="mixed", clip=1.0)
    batch = job.make_batch(0)
    with norm_by(form):
        return step, step.lower(batch), job, optimizer, layout, batch


def time_steps(args: argparse.Namespace) -> None:
    mesh = mw.create_mesh("dp:1", devices=1)
    lowered = {form: lowered_step(form, mesh, args) for form in FORMS}
    with concurrent.futures.ThreadPoolExecutor(len(FORMS)) as pool:
        programs = dict(zip(FORMS, pool.map(lambda form: lowered[form][1].compile(), FORMS), strict=True))
    running: dict[str, Any] = {}
    for form, (step, _, job, optimizer, layout, batch) in lowered.items():
        running[form] = init_state(job, optimizer, layout, jax.random.key(0)), step.place(batch)
    times: dict[str, list[float]] = {form: [] for form in FORMS}
    losses: dict[str, list[float]] = {form: [] for form in FORMS}
    order = list(FORMS)
    for number in range(2 + args.steps):
        random.Random(number).shuffle(order)
        for form in order:
            state, batch = running[form]
            start = time.perf_counter()
            state, metrics = programs[form](state, batch)
            jax.block_until_ready(metrics["loss"])
            seconds = time.perf_counter() - start
            running[form] = state, batch
            losses[form].append(float(metrics["loss"]))
            times[form] += [seconds * 1e3] if number >= 2 else []
    lines = []
    for form, values in times.items():
        kernels = sum("gated_head_norm" in kernel.operation for kernel in kernels_of(programs[form].as_text()))
        memory = programs[form].memory_analysis().peak_memory_in_bytes / 2**30
        lines.append(
            [form, kernels, f"{statistics.median(values):.1f}", f"{min(values):.1f}-{max(values):.1f}",
             f"{memory:.2f}", ", ".join(f"{loss:.4f}" for loss in (*losses[form][:3], losses[form][-1]))]
        )  # fmt: skip
    print(f"train steps of an xLSTM, mixed precision; medians of {args.steps} steps in a drawn order")
    print(table(["norm", "its kernels", "ms", "range", "program's peak GiB", "losses"], lines), flush=True)
    saved = [xla - kernels for xla, kernels in zip(*times.values(), strict=True)]
    error = statistics.stdev(saved) / len(saved) ** 0.5 if len(saved) > 1 else float("nan")
    print(f"saved per step: {statistics.mean(saved):.2f} ms, standard error {error:.2f}", flush=True)


# --- Bytes ---


def count(args: argparse.Namespace) -> None:
    """Prints the bytes of the passes over heads in each layer of the step."""
    mesh, lines = mesh_on_target("h200:1x1", "dp:1"), []
    for form in FORMS:
        text = lowered_step(form, mesh, args, num_layers=2, vocab_size=512)[1].compile().as_text()
        kernels = [kernel for kernel in kernels_of(text) if not kernel.is_matmul]
        heads = max(size for kernel in kernels if "mlstm_outputs" in kernel.operation for size in kernel.read)
        for way in ("jvp(mlstm)", "transpose(jvp(mlstm))"):
            here = [kernel for kernel in kernels if f"/{way}/" in kernel.operation]
            # The passes of XLA over heads, and the kernels of the norm; the cell's are the same in both forms.
            here = [kernel for kernel in here if "norm" in kernel.operation or is_pass(kernel, heads)]
            moved = sum(kernel.moved for kernel in here)
            lines.append(
                [form, "forward" if way.startswith("jvp") else "gradient", len(here) / 2, f"{moved / 2e6:.0f}"]
            )
        lines.append([form, "all but matmuls", "", f"{sum(kernel.moved for kernel in kernels) / 2e6:.0f}"])
        soft = [kernel for kernel in kernels if "tanh" in kernel.operation]
        lines.append([form, "soft caps", len(soft) / 2, f"{sum(kernel.moved for kernel in soft) / 2e6:.1f}"])
    print(f"a layer's share of a step with two layers, 4 x 8192 tokens, compiled for an H200; {versions('jax')}")
    print(table(["norm", "part", "kernels per layer", "MB per layer"], lines))


def is_pass(kernel: Any, heads: int) -> bool:
    """Whether a fusion reads or writes all heads: of the 16-bit arrays of the layer, only theirs are so large."""
    return "mpmd_map" not in kernel.operation and any(size == heads for size in (*kernel.read, *kernel.written))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", action="store_true", help="count the bytes of a program compiled for an H200")
    numbers = range(len(SHAPES))
    parser.add_argument(
        "--shapes", type=int, nargs="*", choices=numbers, default=numbers, help="indices (default: all)"
    )
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--inner", type=int, default=20, help="calls per synchronization (default: 20)")
    parser.add_argument("--steps", type=int, default=0, help="train steps of a whole model to time (default: 0, none)")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to test the script")
    return parser.parse_args()


if __name__ == "__main__":
    main()
