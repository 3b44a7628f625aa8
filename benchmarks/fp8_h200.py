"""One GPU: the decoder's train step with fp8 projections beside the bfloat16 step, and what quantizing costs.

    PYTHONPATH=src python3 benchmarks/fp8_h200.py                                   # one H200; about eight minutes
    PYTHONPATH=src python3 benchmarks/fp8_h200.py --parts 4096 --variants bf16 fixed
    PYTHONPATH=src python3 benchmarks/fp8_h200.py --tiny                            # small sizes on a CPU
    PYTHONPATH=src python3 benchmarks/fp8_h200.py --compile-only --layers 2         # no GPU: compiles for an H200
    PYTHONPATH=src python3 benchmarks/fp8_h200.py --parts curves --seconds 540      # loss curves; about seven minutes

Parts, each in a process of its own:

- check: products and gradients of every recipe against float32, on small shapes; how often a tensor is quantized.
- micro: one matmul, forward, dgrad and wgrad, in bfloat16 and in several ways of writing fp8; and quantizing alone.
- 956m, 4096: the train step (forward, backward, AdamW; mixed precision) of the 956M decoder at 16 x 2048 tokens, and of
  one with d 4096, ff 14336 and 8 layers. Losses of `--losses` steps from the same state on the same text; then times in
  turns, `--rounds` rounds in a drawn order, each of one step to warm up and `--steps` that are timed and waited for.
- curves (only if named): trains the 956M decoder for `--curve-steps` steps on Python sources, one byte per token, with
  warmup, cosine decay and clipping. All variants see the same batches in the same order and, except for `NAME_seedN`,
  start from the same parameters. Prints the losses of every tenth step and how far they are from bf16.

The compiled program says how each matmul runs: XLA falls back to bfloat16 without a word where it does not recognize
fp8. Variants are the recipes of `fp8_matmul.py`. A variant that fails is reported and left out. `--seconds` limits the
whole run: variants that no longer fit are skipped, so those that matter come first.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import math
import os
import random
import re
import statistics
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from fp8_matmul import (
    AMAXES,
    AMAXES_PER_LAYER,
    E4M3,
    E5M2,
    INNER,
    LAST,
    RECIPES,
    ROWS,
    amax_of,
    cast,
    cast_both_ways,
    fp8_projections,
    make_fp8_dots,
    scale_of,
    stacked_weight,
    wide,
)
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from measure import machine, table, verdict, versions

import meshwright as mw
from meshwright.models import Decoder, Execution
from meshwright.rules import Rules
from meshwright.train import init_state, language_job, make_train_step, state_layout

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")

SIZES = {
    "956m": {"vocab_size": 32768, "num_layers": 16, "d_model": 2048, "num_heads": 16, "d_ff": 5632},
    "4096": {"vocab_size": 32768, "num_layers": 8, "d_model": 4096, "num_heads": 32, "d_ff": 14336},
}
TINY = {
    "956m": {"vocab_size": 256, "num_layers": 2, "d_model": 64, "num_heads": 2, "d_ff": 96},
    "4096": {"vocab_size": 256, "num_layers": 1, "d_model": 64, "num_heads": 2, "d_ff": 128},
}
TARGETS = {"956m": 1.30, "4096": 1.45}
DEFAULT_PARTS = ("check", "956m", "4096", "micro")
PARTS = (*DEFAULT_PARTS, "curves")
SHARES = {
    "check": 0.10,
    "956m": 0.50,
    "4096": 0.65,
    "micro": 1.0,
    "curves": 1.0,
}  # of the time that is left when a part begins
VARIANTS = {
    "956m": "bf16 delayed8 current current_delayed8 fixed kernel_delayed delayed8_precise weights_once wgrad_bf16 "
    "delayed direct current_bf16_cast written_first transposes_apart",
    "4096": "bf16 delayed8 current fixed delayed8_precise",
}
CURVE_VARIANTS = ("bf16", "kernel_delayed", "delayed8_precise", "current")
CURVE_BOUND = 5e-3  # of the loss of bf16
MICRO = [(32768, 2048, 5632), (32768, 4096, 14336), (32768, 2048, 2048)]
GPU_OPTIONS = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_enable_dynamic_slice_fusion": False}
GIB = 2**30
MARK = "RESULT "  # begins a line of JSON that a part hands to the parent


def main() -> None:
    args = arguments()
    if args.one:
        RUNS[args.one](args)
        return
    print(f"{machine()}; {versions('jax', 'jaxlib', 'optax')}", flush=True)
    results = [result for part in args.parts for result in run_part(args, part)]
    print("\n# Summary")
    for part in args.parts:
        own = [result for result in results if result["part"] == part]
        if own:
            print(f"\n## {part}\n{SUMMARIES.get(part, step_table)(own)}")
    judge(results)
    if args.write:
        Path(args.write).write_text(json.dumps(results, indent=1) + "\n")


def run_part(args: argparse.Namespace, part: str) -> list[dict[str, Any]]:
    """Runs a part in a process of its own, so that a crash ends no other, and passes its output on as it comes."""
    left = args.deadline - time.time()
    last = part == args.parts[-1]
    limit = left if last or args.compile_only else left * SHARES[part]
    if limit < 5:
        print(f"{part}: skipped, no time left", flush=True)
        return []
    print(f"\n# {part}: at most {limit:.0f} s of {left:.0f}", flush=True)
    command = [sys.executable, "-u", __file__, *sys.argv[1:], "--one", part, "--until", str(time.time() + limit)]
    started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    # A part looks at the clock itself; one that hangs is ended somewhat later.
    timer = threading.Timer(limit + 20, started.kill)
    timer.start()
    found = []
    assert started.stdout is not None
    for line in started.stdout:
        if line.startswith(MARK):
            found.append({"part": part} | json.loads(line.removeprefix(MARK)))
        else:
            print(line, end="", flush=True)
    timer.cancel()
    status = started.wait()
    found = list({result["name"] + result.get("shape", ""): result for result in found}.values())  # the last of each
    print(
        f"{part}: {time.time() - args.deadline + left:.0f} s" + (f", ended with {status}" if status else ""), flush=True
    )
    return found


def tell(result: dict[str, Any]) -> None:
    print(MARK + json.dumps(result), flush=True)


def attempt(what: str, function: Callable[[], Any]) -> Any:
    """Returns the result of a function, or None after printing its error: one failure must not end a run."""
    try:
        return function()
    except Exception as error:
        lines = [line[:300] for line in f"{type(error).__name__}: {error}".splitlines()[:4]]
        where = traceback.extract_tb(error.__traceback__)[-1]
        print(f"FAILED {what}: {' / '.join(lines)} ({Path(where.filename).name}:{where.lineno})", flush=True)
        tell({"name": what, "failed": lines[0]})
        return None


# --- What a compiled program says ---

SHAPE = re.compile(r"\b(pred|[a-z]+\d+[a-z0-9]*)\[([\d,]*)\]")
DEFINED = re.compile(r"\s*(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*?)\)")
OUTSIDE = ("fusion", "custom-call", "copy", "transpose", "reduce", "convert", "concatenate")


def matmuls(text: str) -> Counter[str]:
    """Counts the matmuls of a compiled program by call target and dtypes, e.g. `lt$matmul$f8 e4m3*e5m2->bf16`."""
    shapes, found = {}, Counter()
    for line in text.splitlines():
        if match := DEFINED.match(line):
            shapes[match[1]] = match[2]
    for line in text.splitlines():
        match = DEFINED.match(line)
        if not match:
            continue
        target = re.search(r'custom_call_target="([^"]*)"', line)
        name = target[1] if target and match[3] == "custom-call" else match[3]
        if not (name in ("dot", "ragged-dot") or "matmul" in name or "gemm" in name or "block_scaled" in name):
            if match[3] == "fusion" and "__triton_nested_gemm_fusion" in line:
                found["triton gemm fusion"] += 1
            continue
        kinds = [_dtype(shapes.get(operand.strip().lstrip("%"), "?")) for operand in match[4].split(",")[:2]]
        short = name.removeprefix("__cublas$").removeprefix("__cublas")
        fast = "" if "$f8" not in name else ", precise" if re.search(r'operand_precision":\["HIGHEST', line) else ""
        found[f"{short} {'*'.join(kinds)}->{_dtype(match[2])}{fast}"] += 1
    return found


def _dtype(shape: str) -> str:
    match = SHAPE.search(shape)
    return match[1].replace("f8e", "e").removesuffix("fn") if match else "?"


def gigabytes(text: str) -> float:
    """Returns what kernels other than matmuls read and write in a program's main computation, in GB."""
    shapes, total = {}, 0
    for line in text.splitlines():
        if match := DEFINED.match(line):
            shapes[match[1]] = match[2]
    for line in text[max(0, text.find("\nENTRY")) :].splitlines():
        match = DEFINED.match(line)
        if not match or match[3] not in OUTSIDE or "__cublas" in line or "cudnn" in line:
            continue
        operands = [shapes.get(operand.strip().lstrip("%"), "") for operand in match[4].split(",")]
        total += sum(_bytes(shape) for shape in (match[2], *operands))
    return total / 1e9


def _bytes(shape: str) -> int:
    total = 0
    for dtype, dims in SHAPE.findall(shape):
        bits = 8 if dtype == "pred" or dtype.startswith("f8") else int(re.findall(r"\d+", dtype)[0])
        total += math.prod(int(dim) for dim in dims.split(",") if dim) * bits // 8
    return total


def listed(counts: Counter[str]) -> str:
    return "; ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "none"


# --- check: against float32 ---

BOUNDS = {"y": 5e-2, "dx": 1e-1, "dw": 1e-1}
QUANTIZED = 1e-2  # fp8 cannot be closer to float32 than this; bfloat16 is
# XLA joins small dots that share an operand, and no longer recognizes fp8 in the result. It then drops the casts to fp8
# and back as excess precision. The dots of a real step are too large to be joined.
CHECK_OPTIONS = GPU_OPTIONS | {"xla_gpu_dot_merger_threshold_mb": 0}


def run_check(args: argparse.Namespace) -> None:
    rows, k, n = (64, 32, 48) if args.tiny else (512, 256, 384)
    keys = jax.random.split(jax.random.key(0), 6)
    x = jax.random.normal(keys[0], (2, rows // 2, k), jnp.bfloat16)
    ws = tuple(jax.random.normal(key, (k, n), jnp.bfloat16) * k**-0.5 for key in keys[1:3])
    gs = tuple(jax.random.normal(key, (2, rows // 2, n), jnp.bfloat16) * 1e-3 for key in keys[3:5])

    def both(dots: Any, x: Any, ws: Any, gs: Any, amaxes: Any) -> Any:
        ys, pull = jax.vjp(dots, x, ws, amaxes)
        return ys, *pull(gs)

    def exact(x: Any, ws: Any, amaxes: Any) -> Any:
        return tuple(jnp.matmul(x, w, precision="highest") for w in ws)

    on_gpu = jax.default_backend() == "gpu"
    options = CHECK_OPTIONS if on_gpu else {"xla_allow_excess_precision": False}
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), (x, ws, gs))
    known = jnp.stack([jnp.abs(leaf).max() for leaf in jax.tree.leaves(wide)])
    reference = jax.jit(lambda *values: both(exact, *values))(*wide, known)
    for name in args.variants or RECIPES:
        recipe = RECIPES[name]
        if recipe is None or recipe.stacked or time.time() > args.until:
            continue
        dots = make_fp8_dots(recipe)

        def one(name: str = name, recipe: Any = recipe, dots: Any = dots) -> None:
            casts = str(jax.make_jaxpr(lambda *values: both(dots, *values))(x, ws, gs, known))
            count = len(re.findall(r"convert_element_type\[\s*new_dtype=float8", casts))
            gradients = tuple(g / 1e-3 for g in gs) if recipe.scaling == "fixed" else gs
            program = jax.jit(lambda *values: both(dots, *values), compiler_options=options)
            compiled = program.lower(x, ws, gradients, known).compile()
            ys, dx, dws, news = compiled(x, ws, gradients, known)
            if recipe.scaling == "fixed":  # its scale is for gradients of a summed loss
                dx, dws = jax.tree.map(lambda leaf: leaf * 1e-3, (dx, dws))
            errors = {
                key: max(apart(a, b) for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True))
                for key, got, want in zip(BOUNDS, (ys, dx, dws), reference[:3], strict=True)
            }
            amaxes_agree = not recipe.keeps_amaxes or apart(news, known) < 0.1
            zero, *zero_gradients, _ = compiled(0 * x, ws, gs, known)
            finite = all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves((zero, zero_gradients)))
            close = all(errors[key] <= BOUNDS[key] for key in BOUNDS)
            in_fp8 = sum(number for kind, number in matmuls(compiled.as_text()).items() if "$f8" in kind)
            rounded = [error > QUANTIZED for key, error in errors.items() if key != "dw" or recipe.wgrad]
            quantized = all(rounded) and (not on_gpu or in_fp8 == 2 * len(rounded))
            met = close and finite and amaxes_agree and quantized
            text = ", ".join(f"{key} {error:.1e}" for key, error in errors.items())
            text += f" from float32; {count} casts; amaxes {'agree' if amaxes_agree else 'DIFFER'}"
            text += f"; {in_fp8} of {2 * len(rounded)} matmuls in fp8" if on_gpu else ""
            print(verdict(f"{name}: {text}" + ("" if all(rounded) else "; NOT QUANTIZED"), met), flush=True)
            tell({"name": name, **errors, "casts": count, "in_fp8": in_fp8, "met": met})

        attempt(f"check {name}", one)


def apart(got: Any, want: Any) -> float:
    got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


# --- micro: one matmul ---


Program = tuple[Callable[..., Any], Any, Any]
"""A function of two operands and their scales, and shape and dtype of each operand."""


def matmul_programs(m: int, k: int, n: int) -> dict[str, Program]:
    bf16, f32 = jnp.bfloat16, jnp.float32

    def plain(dims: Any, **asked: Any) -> Callable[..., Any]:
        return lambda a, b, *_: lax.dot_general(a, b, (dims, ((), ())), preferred_element_type=bf16, **asked)

    def pattern(dims: Any, **asked: Any) -> Callable[..., Any]:
        dot = plain(dims, **asked)
        return lambda a, b, s, t: dot(wide(a, s), wide(b, t))

    def direct(dims: Any, out: Any) -> Callable[..., Any]:
        def dot(a: Any, b: Any, s: Any, t: Any) -> Any:
            product = lax.dot_general(a, b, (dims, ((), ())), preferred_element_type=out)
            return (product * (s * t).astype(out)).astype(bf16)

        return dot

    def scaled(a: Any, b: Any, s: Any, t: Any) -> Any:
        ones = [jnp.ones((1, rows, k // 32), jnp.float8_e8m0fnu) for rows in (m, n)]
        return jax.nn.scaled_matmul(a[None], b[None], *ones, preferred_element_type=bf16)[0] * (s * t).astype(bf16)

    exact = {"precision": lax.Precision.HIGHEST}
    x, w, g = (m, k), (k, n), (m, n)
    x_turned, w_turned, g_turned = (k, m), (n, k), (n, m)
    return {
        "fwd bf16": (plain(INNER), (x, bf16), (w, bf16)),
        "fwd pattern": (pattern(INNER), (x, E4M3), (w, E4M3)),
        "fwd pattern, transposed": (pattern(LAST), (x, E4M3), (w_turned, E4M3)),
        "fwd direct bf16, transposed": (direct(LAST, bf16), (x, E4M3), (w_turned, E4M3)),
        "fwd direct f32, transposed": (direct(LAST, f32), (x, E4M3), (w_turned, E4M3)),
        "fwd pattern, transposed, precise": (pattern(LAST, **exact), (x, E4M3), (w_turned, E4M3)),
        "fwd scaled_matmul": (scaled, (x, E4M3), (w_turned, E4M3)),
        "dgrad bf16": (plain(LAST), (g, bf16), (w, bf16)),
        "dgrad pattern": (pattern(LAST), (g, E5M2), (w, E4M3)),
        "dgrad direct bf16": (direct(LAST, bf16), (g, E5M2), (w, E4M3)),
        "dgrad pattern, precise": (pattern(LAST, **exact), (g, E5M2), (w, E4M3)),
        "wgrad bf16": (plain(ROWS), (x, bf16), (g, bf16)),
        "wgrad pattern": (pattern(ROWS), (x, E4M3), (g, E5M2)),
        "wgrad pattern, transposed": (pattern(LAST), (x_turned, E4M3), (g_turned, E5M2)),
        "wgrad direct bf16, transposed": (direct(LAST, bf16), (x_turned, E4M3), (g_turned, E5M2)),
        "wgrad pattern, transposed, precise": (pattern(LAST, **exact), (x_turned, E4M3), (g_turned, E5M2)),
    }


def quantize_programs(m: int, k: int) -> dict[str, Program]:
    def quantized(x: Any, scale: Any, *, turned: bool) -> Any:
        x8 = cast(x, scale, E4M3, saturates=False)
        return (x8, x8.T) if turned else x8

    def current(x: Any, *, turned: bool) -> Any:
        return quantized(x, scale_of(amax_of(x), E4M3), turned=turned)

    functions: dict[str, Callable[..., Any]] = {
        "quantize: amax": lambda x, _, s, t: amax_of(x),
        "quantize: cast": lambda x, _, s, t: quantized(x, s, turned=False),
        "quantize: cast, transpose": lambda x, _, s, t: quantized(x, s, turned=True),
        "quantize: amax, cast": lambda x, _, s, t: current(x, turned=False),
        "quantize: amax, cast, transpose": lambda x, _, s, t: current(x, turned=True),
        "quantize: cast, transpose, amax by a kernel": lambda x, _, s, t: cast_both_ways(x, s, E4M3),
    }
    return {name: (function, ((m, k), jnp.bfloat16), None) for name, function in functions.items()}


def run_micro(args: argparse.Namespace) -> None:
    on_gpu = args.compile_only or jax.default_backend() == "gpu"
    where = NamedSharding(target_mesh()[0], P()) if args.compile_only else None

    def operand(wanted: Any, seed: int) -> Any:
        if wanted is None:
            return None
        shape, dtype = wanted
        if args.compile_only:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=where)
        return jax.jit(lambda key: jax.random.normal(key, shape, jnp.bfloat16).astype(dtype))(jax.random.key(seed))

    def build(program: Program) -> tuple[Any, ...]:
        function, first, second = program
        operands = operand(first, 1), operand(second, 2), operand(((), jnp.float32), 3), operand(((), jnp.float32), 4)
        options = GPU_OPTIONS if on_gpu else None
        compiled = jax.jit(function, compiler_options=options).lower(*operands).compile()
        return compiled, operands, listed(matmuls(compiled.as_text()))

    for m, k, n in [(64, 32, 48)] if args.tiny else MICRO:
        shape = f"{m} x {k} x {n}"
        print(shape, flush=True)
        programs, times = {}, {}
        for name, program in (matmul_programs(m, k, n) | quantize_programs(m, k)).items():
            if time.time() > args.until - 10:
                print(f"{name} and those after it: skipped, too little time is left", flush=True)
                break
            built = attempt(f"{name} {shape}", functools.partial(build, program))
            if built is None:
                continue
            if args.compile_only:
                print(f"  {name:45} {built[2]}", flush=True)
                continue
            took = attempt(f"{name} {shape}", functools.partial(back_to_back, *built[:2], args.tiny))
            if took is not None:
                programs[name], times[name] = built, [took]
        for _ in range(2):  # once more in turns, on a hot chip
            for name, (compiled, operands, _kinds) in programs.items():
                if time.time() < args.until - 5:
                    times[name].append(back_to_back(compiled, operands, args.tiny))
        for name, values in times.items():
            milliseconds, kinds = 1e3 * statistics.median(values), programs[name][2]
            rate = None if name.startswith("quantize") else 2 * m * k * n / milliseconds / 1e9
            tell({"shape": shape, "name": name, "ms": milliseconds, "kinds": kinds, "tflops": rate})
            print(f"  {name:45} {milliseconds:8.3f} ms  {kinds}", flush=True)


def back_to_back(compiled: Any, operands: Any, tiny: bool) -> float:
    """Returns seconds per call, of calls that are not waited for one by one."""
    count = 2 if tiny else 20
    for repeats in (2, count):
        start = time.perf_counter()
        for _ in range(repeats):
            out = compiled(*operands)
        jax.block_until_ready(out)
    return (time.perf_counter() - start) / count


def target_mesh() -> tuple[Any, Any]:
    """Returns a mesh of one H200 that need not be there, and the context in which steps are traced for it."""
    from meshwright.plan.compiled.topology import assumed_cudnn, mesh_on_target, stand_in_for_cudnn

    stand_in_for_cudnn()
    return mesh_on_target("h200:1x1", "dp:1"), assumed_cudnn


# --- The train step ---


class Variant:
    """A train step by one recipe. States of all variants are alike but for the amaxes of delayed scaling."""

    def __init__(self, args: argparse.Namespace, name: str, sizes: dict[str, int], mesh: Any, rate: Any = None) -> None:
        self.name, self.recipe, self.part, self.folder = name, RECIPES[name], args.one, args.hlo
        self.amaxes, self.batch, self.seq = AMAXES, args.batch, args.seq
        # Written out, as "auto" has it on GPUs: amaxes are handed out in the order of the trace.
        job = language_job(Decoder(**sizes), batch_size=args.batch, num_tokens=args.seq, run=Execution(layers="unroll"))
        self.delayed = self.recipe is not None and self.recipe.keeps_amaxes
        self.optimizer = optax.adamw(rate or 3e-4, b1=0.9, b2=0.95, weight_decay=0.1)
        if rate is not None:  # by the optimizer, not by the step, so that amaxes are not clipped as gradients
            self.optimizer = optax.chain(optax.clip_by_global_norm(1.0), self.optimizer)
        self.first = jnp.full(AMAXES_PER_LAYER * sizes["num_layers"], 8.0)
        rules, init = job.rules, job.init
        if self.delayed:
            rules = Rules([*job.rules, (AMAXES, P())], optional_axes=("fsdp", "tp", "pp"))
            init = lambda key: {**job.init(key), AMAXES: self.first}  # noqa: E731
            self.optimizer = overwriting(self.optimizer, AMAXES, args.batch * args.seq)
        self.job = mw.Job(init=init, rules=rules, loss=self._loss(job), batch=job.batch)
        self.layout = state_layout(self.job, self.optimizer, mesh)
        self.step = make_train_step(self.job, self.optimizer, self.layout, precision="mixed")
        self.times: list[float] = []
        self.losses: list[float] = []

    def _loss(self, job: Any) -> Callable[..., Any]:
        def loss(params: Any, batch: Any, rng: Any, *, remat: Any = "none") -> Any:
            with fp8_projections(self.recipe) as amaxes:
                if self.delayed:
                    amaxes.start(params[self.amaxes])
                    params = {name: leaf for name, leaf in params.items() if name != self.amaxes}
                if self.recipe is not None and self.recipe.stacked:
                    layers = dict(params["layers"])
                    for block in ("attn", "mlp"):
                        layers[block] = {name: stacked_weight(leaf) for name, leaf in layers[block].items()}
                    params = {**params, "layers": layers}
                return job.loss(params, batch, rng, remat=remat)

        return loss

    def compile(self) -> None:
        """Compiles the step, and reads off the program what it needs and how its matmuls run."""
        start = time.time()
        self.compiled = self.step.lower(self.job.batch).compile()
        self.seconds = time.time() - start
        text = self.compiled.as_text()
        if self.folder:
            Path(self.folder, f"{self.part}-{self.name}.hlo").write_text(text)
        self.matmuls, self.moved = matmuls(text), gigabytes(text)
        self.peak = self.compiled.memory_analysis().peak_memory_in_bytes / GIB
        self.in_fp8 = sum(count for name, count in self.matmuls.items() if "$f8" in name)

    def adapt(self, state: Any, amaxes: Any) -> Any:
        """Returns a state with or without amaxes, as this step wants it; nothing is copied."""
        params = {name: leaf for name, leaf in state.params.items() if name != self.amaxes}
        return dataclasses.replace(state, params=params | {self.amaxes: amaxes} if self.delayed else params)

    def run(self, state: Any, batches: list[Any], *, losses: bool = False) -> tuple[Any, list[float]]:
        times = []
        for batch in batches:
            start = time.perf_counter()
            state, metrics = self.compiled(state, batch)
            jax.block_until_ready(metrics["loss"])
            times.append(time.perf_counter() - start)
            if losses:
                self.losses.append(float(metrics["loss"]))
        return state, times

    def ms(self) -> float:
        return 1e3 * statistics.median(self.times)

    def result(self, first: Variant) -> dict[str, Any]:
        differences = [abs(a - b) / b for a, b in zip(self.losses, first.losses, strict=True)]
        return {
            "name": self.name, "ms": self.ms(), "range": [1e3 * min(self.times), 1e3 * max(self.times)],
            "ratio": first.ms() / self.ms() if first.recipe is None else None, "peak_GiB": self.peak,
            "compile_s": self.seconds, "moved_GB": self.moved, "in_fp8": self.in_fp8, "matmuls": dict(self.matmuls),
            "losses": self.losses, "loss_apart": max(differences), "tokens": self.batch * self.seq,
        }  # fmt: skip


def overwriting(optimizer: Any, name: str, count: int) -> Any:
    """Returns the optimizer for all leaves but one, whose gradient, times `count`, becomes its value."""

    def without(tree: Any) -> Any:
        return {key: leaf for key, leaf in tree.items() if key != name}

    def update(grads: Any, state: Any, params: Any) -> Any:
        updates, state = optimizer.update(without(grads), state, without(params))
        # Gradients are divided by the number of tokens after the backward pass.
        return updates | {name: grads[name] * count - params[name]}, state

    return optax.GradientTransformation(lambda params: optimizer.init(without(params)), update)


def run_steps(args: argparse.Namespace) -> None:
    sizes = dict((TINY if args.tiny else SIZES)[args.one])
    if args.layers:
        sizes["num_layers"] = args.layers
    if args.tiny:
        args.batch, args.seq = 2, 16
    compiling = contextlib.nullcontext
    if args.compile_only:
        mesh, compiling = target_mesh()
    else:
        mesh = mw.create_mesh("dp:1", devices=1)
        print(f"{jax.devices()[0].device_kind}; {sizes}; {args.batch} x {args.seq} tokens", flush=True)
    names = args.variants or VARIANTS[args.one].split()
    ready: list[Variant] = []
    reserve = 0.0  # seconds for the losses and times of the variants that are compiled
    begin = None
    for name in names:
        if time.time() + reserve + 20 > args.until and ready:
            print(f"{name}: skipped, too little time is left", flush=True)
            continue

        def prepare(name: str = name) -> Variant:
            variant = Variant(args, name, sizes, mesh)
            with compiling():
                variant.compile()
            return variant

        variant = attempt(f"{args.one} {name}", prepare)
        if variant is None:
            continue
        projections = 21 * sizes["num_layers"]
        print(
            f"{name}: compiled in {variant.seconds:.0f} s, peak {variant.peak:.2f} GiB, {variant.moved:.1f} GB outside "
            f"of matmuls; {variant.in_fp8} of {projections} projections in fp8: {listed(variant.matmuls)}",
            flush=True,
        )
        if args.compile_only:
            continue
        if begin is None:
            made = init_state(variant.job, variant.optimizer, variant.layout, jax.random.key(0))
            made = jax.block_until_ready(made)
            params = {key: leaf for key, leaf in made.params.items() if key != variant.amaxes}
            begin = dataclasses.replace(made, params=params)
            texts = [variant.step.place(batch) for batch in text_batches(args, sizes["vocab_size"], args.losses)]
            print(f"  initialized at {args.until - time.time():.0f} s before the end", flush=True)

        # Every variant starts from a copy of the same state, and sees the same text once.
        def lose(variant: Variant = variant, begin: Any = begin, texts: Any = texts) -> Variant:
            start = time.perf_counter()
            state = variant.adapt(jax.tree.map(jnp.copy, begin), jnp.copy(variant.first))
            state, times = variant.run(state, texts, losses=True)
            variant.last_amaxes = state.params.get(variant.amaxes)
            variant.took = time.perf_counter() - start
            losses = " ".join(f"{loss:.4f}" for loss in variant.losses)
            print(f"  {1e3 * statistics.median(times):.1f} ms at first; losses {losses}", flush=True)
            return variant

        if attempt(f"{args.one} {name}", lose):
            ready.append(variant)
            step = variant.took / max(1, args.losses)
            reserve += args.rounds * (args.steps + 1) * step
    if args.compile_only or not ready:
        return

    # In turns, by one state that goes from variant to variant.
    batch, state, rng = texts[0], begin, random.Random(0)
    del begin
    for number in range(args.rounds):
        for variant in rng.sample(ready, len(ready)):
            left = args.until - time.time()
            if number and left < (args.steps + 1) * variant.took / args.losses + 2:
                print(f"round {number + 1}: {variant.name} skipped, {left:.0f} s left", flush=True)
                continue

            def turn(variant: Variant = variant, state: Any = state) -> tuple[Any, list[float]]:
                amaxes = None if variant.last_amaxes is None else jnp.copy(variant.last_amaxes)
                return variant.run(variant.adapt(state, amaxes), [batch] * (args.steps + 1))

            if done := attempt(f"{args.one} {variant.name}, timed", turn):
                state, times = done
                variant.times += times[1:]
            else:  # the state is gone with it
                ready.remove(variant)
                state = init_state(variant.job, variant.optimizer, variant.layout, jax.random.key(0))
        print(f"round {number + 1}: " + ", ".join(f"{v.name} {v.ms():.1f}" for v in ready if v.times), flush=True)
        for variant in ready:  # after every round, in case that a later one does not end
            if variant.times:
                tell(variant.result(ready[0]))


def text_batches(args: argparse.Namespace, vocab_size: int, count: int) -> list[dict[str, Any]]:
    """Returns batches of bytes of the standard library's sources, each seen once."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    text = np.frombuffer(b"\n".join(path.read_bytes() for path in files), np.uint8).astype(np.int32) % vocab_size
    size = args.batch * (args.seq + 1)
    rows = [np.resize(text[i * size :], size).reshape(args.batch, -1) for i in range(count)]
    return [{"inputs": row[:, :-1], "targets": row[:, 1:]} for row in rows]


# --- curves: longer runs ---

SEEDED = re.compile(r"(\w+?)(?:_seed(\d+))?")


def curve_variant(text: str) -> str:
    match = SEEDED.fullmatch(text)
    if match is None or match[1] not in RECIPES:
        raise argparse.ArgumentTypeError(f"unknown recipe {text!r}; known: {', '.join(RECIPES)}")
    return text


def run_curves(args: argparse.Namespace) -> None:
    sizes = dict((TINY if args.tiny else SIZES)["956m"])
    sizes["num_layers"] = args.layers or sizes["num_layers"]
    if args.tiny:
        args.batch, args.seq = 2, 16
    mesh, compiling = (
        target_mesh() if args.compile_only else (mw.create_mesh("dp:1", devices=1), contextlib.nullcontext)
    )
    count = args.curve_steps
    warmup = max(1, count // 10)
    rate = optax.warmup_cosine_decay_schedule(0.0, 3e-4, warmup, max(count, warmup + 1), 3e-5)
    if not args.compile_only:
        print(f"{jax.devices()[0].device_kind}; {sizes}; {args.batch} x {args.seq} tokens; {count} steps", flush=True)
    compiled: dict[str, Variant] = {}
    begins: dict[int, Any] = {}
    batches: list[Any] = []
    first: dict[str, Any] = {}

    def prepare(recipe: str) -> Variant:
        if recipe not in compiled:
            variant = Variant(args, recipe, sizes, mesh, rate)
            with compiling():
                variant.compile()
            print(
                f"{recipe}: compiled in {variant.seconds:.0f} s, peak {variant.peak:.2f} GiB, {variant.in_fp8} of "
                f"{21 * sizes['num_layers']} projections in fp8: {listed(variant.matmuls)}",
                flush=True,
            )
            compiled[recipe] = variant
        return compiled[recipe]

    def begin(variant: Variant, seed: int) -> Any:
        if seed not in begins:
            made = init_state(variant.job, variant.optimizer, variant.layout, jax.random.key(seed))
            params = {key: leaf for key, leaf in made.params.items() if key != variant.amaxes}
            begins[seed] = dataclasses.replace(made, params=params)
        return variant.adapt(jax.tree.map(jnp.copy, begins[seed]), jnp.copy(variant.first))

    def train(name: str, recipe: str, seed: int) -> None:
        variant = prepare(recipe)
        if args.compile_only:
            return
        if not batches:
            batches.extend(variant.step.place(batch) for batch in curve_batches(args, sizes["vocab_size"], count))
        state, losses, times = begin(variant, seed), [], []
        for batch in batches:
            if time.time() > args.until - 3:
                print(f"{name}: stopped after {len(losses)} of {count} steps, no time left", flush=True)
                break
            start = time.perf_counter()
            state, metrics = variant.compiled(state, batch)
            losses.append(float(metrics["loss"]))
            times.append(time.perf_counter() - start)
        if not losses:
            return
        result = {
            "name": name, "seed": seed, "steps": len(losses), "planned": count, "ms": 1e3 * statistics.median(times),
            "compile_s": variant.seconds, "in_fp8": variant.in_fp8, "losses": losses,
        }  # fmt: skip
        shown = " ".join(f"{step}: {losses[step - 1]:.4f}" for step in tenth_steps(len(losses)))
        print(f"{name}: {result['ms']:.1f} ms a step; losses {shown}", flush=True)
        if first:
            result |= {"baseline": first["name"]} | differences(losses, first["losses"])
            print(curve_verdict(result), flush=True)
        else:
            first.update(result)
        tell(result)

    for name in args.curve_variants:
        match = SEEDED.fullmatch(name)
        assert match is not None
        if not args.compile_only and time.time() + (0 if args.tiny else 30) > args.until:
            print(f"{name}: skipped, too little time is left", flush=True)
            continue
        attempt(f"curves {name}", functools.partial(train, name, match[1], int(match[2] or 0)))


def tenth_steps(count: int) -> range:
    """Returns the steps, from 1 on, whose losses are compared: every tenth, or all of a very short run."""
    return range(10, count + 1, 10) if count >= 20 else range(1, count + 1)


def differences(losses: list[float], first: list[float]) -> dict[str, Any]:
    """Returns the largest relative differences of two curves over all tenth steps and the last half of them."""
    count = min(len(losses), len(first))
    parts = {step: losses[step - 1] / first[step - 1] - 1 for step in range(1, count + 1)}
    tenths = {step: abs(parts[step]) for step in tenth_steps(count)}
    late = [size for step, size in tenths.items() if step > count // 2]
    # A NaN is a failure, not a small difference; `max` would ignore it.
    largest = [max(sizes) if all(map(math.isfinite, sizes)) else math.inf for sizes in (late, tenths.values())]
    mean = statistics.fmean(parts[step] for step in parts if step > count // 2)
    return {"apart": largest[1], "apart_late": largest[0], "mean_late": mean, "compared": count}


def curve_verdict(result: dict[str, Any]) -> str:
    text = (
        f"curves: {result['name']} differs from {result['baseline']} by at most {result['apart_late']:.2%} in the last "
        f"half and {result['apart']:.2%} in all of {result['compared']} steps, every tenth compared; mean of the last "
        f"half {result['mean_late']:+.2%}"
    )
    if result["seed"]:
        return f"{text} (other initial parameters)"
    return verdict(f"{text} ({CURVE_BOUND:.1%} wanted in the last half)", result["apart_late"] <= CURVE_BOUND)


def curve_batches(args: argparse.Namespace, vocab_size: int, count: int) -> list[dict[str, Any]]:
    """Returns batches of rows of Python sources in a drawn order, one byte per token.

    The standard library comes first; packages follow if it is too short for a single pass.
    """
    wanted, length, parts = count * args.batch * (args.seq + 1), args.seq + 1, []
    for module in (os, jax, np, optax):
        for path in sorted(Path(str(module.__file__)).parent.rglob("*.py")):
            if path.is_file() and "site-packages" not in path.relative_to(Path(str(module.__file__)).parent).parts:
                parts.append(path.read_bytes())
        if sum(map(len, parts)) >= wanted:
            break
    text = np.frombuffer(b"\n".join(parts), np.uint8)
    rows = text[: len(text) // length * length].reshape(-1, length)
    rng = np.random.default_rng(0)
    passes = -(-count * args.batch // len(rows))
    order = np.concatenate([rng.permutation(len(rows)) for _ in range(passes)])
    print(f"{len(text) / 1e6:.1f} MB of text; {count * args.batch / len(rows):.2f} passes", flush=True)
    chosen = [rows[order[i * args.batch :][: args.batch]].astype(np.int32) % vocab_size for i in range(count)]
    return [{"inputs": batch[:, :-1], "targets": batch[:, 1:]} for batch in chosen]


# --- Tables ---


def step_table(results: list[dict[str, Any]]) -> str:
    headings = ["variant", "ms", "range", "of bf16", "tokens/s", "peak GiB", "GB moved", "in fp8", "last loss", "apart"]
    rows = []
    for result in results:
        if "failed" in result:
            rows.append([result["name"], result["failed"][:60], *[""] * 8])
            continue
        low, high = result["range"]
        rows.append(
            [
                result["name"],
                f"{result['ms']:.1f}",
                f"{low:.0f}-{high:.0f}",
                f"{result['ratio']:.3f}" if result["ratio"] else "",
                f"{1e3 * result['tokens'] / result['ms']:.0f}",
                f"{result['peak_GiB']:.1f}",
                f"{result['moved_GB']:.0f}",
                result["in_fp8"],
                f"{result['losses'][-1]:.4f}",
                f"{result['loss_apart']:.1e}",
            ]
        )
    return table(headings, rows)


def micro_table(results: list[dict[str, Any]]) -> str:
    rows = []
    for result in results:
        if "failed" in result:
            rows.append(["", result["name"], result["failed"][:60], "", ""])
            continue
        rate = "" if result["tflops"] is None else f"{result['tflops']:.0f}"
        rows.append([result["shape"], result["name"], f"{result['ms']:.3f}", rate, result["kinds"]])
    return table(["rows x K x N", "program", "ms", "TFLOP/s", "matmuls"], rows)


def check_table(results: list[dict[str, Any]]) -> str:
    rows = [
        [result["name"], result["failed"][:60], *[""] * (len(BOUNDS) + len(CHECKED) - 1)]
        if "failed" in result
        else [result["name"], *(f"{result[key]:.1e}" for key in BOUNDS), *(result[key] for key in CHECKED)]
        for result in results
    ]
    return table(["recipe", *BOUNDS, "casts", "in fp8", "met"], rows)


def curve_table(results: list[dict[str, Any]]) -> str:
    """Returns the losses of all variants side by side, each with its relative difference from the first's."""
    own = [result for result in results if "failed" not in result]
    rows = []
    for step in tenth_steps(max((len(result["losses"]) for result in own), default=0)):
        cells = []
        for result in own:
            losses, first = result["losses"], own[0]["losses"]
            cell = f"{losses[step - 1]:.4f}" if step <= len(losses) else ""
            if cell and result is not own[0] and step <= len(first):
                cell += f" ({losses[step - 1] / first[step - 1] - 1:+.2%})"
            cells.append(cell)
        rows.append([step, *cells])
    failed = [f"{result['name']}: {result['failed'][:100]}" for result in results if "failed" in result]
    return "\n".join([table(["step", *(result["name"] for result in own)], rows), *failed])


CHECKED = ("casts", "in_fp8", "met")
SUMMARIES = {"check": check_table, "micro": micro_table, "curves": curve_table}


def judge(results: list[dict[str, Any]]) -> None:
    for result in results:
        if result["part"] == "curves" and "apart" in result:
            print(curve_verdict(result))
    for part, wanted in TARGETS.items():
        own = [result for result in results if result["part"] == part and result.get("ratio")]
        plain = next((result for result in own if result["name"] == "bf16"), None)
        others = [result for result in own if result["name"] not in ("bf16", "fixed")]
        if plain is None or not others:
            continue
        best = max(others, key=lambda result: result["ratio"])
        print(
            verdict(f"{part}: {best['name']} is {best['ratio']:.3f}x bf16 ({wanted} wanted)", best["ratio"] >= wanted)
        )
        peaks = f"{best['peak_GiB']:.1f} GiB at the peak, bf16 {plain['peak_GiB']:.1f}"
        print(verdict(f"{part}: {peaks}", best["peak_GiB"] <= plain["peak_GiB"]))
        print(
            verdict(f"{part}: losses at most {best['loss_apart']:.1e} apart (5e-3 allowed)", best["loss_apart"] < 5e-3)
        )
        most = max(result["in_fp8"] for result in others)
        for result in others:
            if result["in_fp8"] < most and result["name"] != "wgrad_bf16":
                print(verdict(f"{part}: {result['name']} runs {result['in_fp8']} of {most} projections in fp8", False))


RUNS = {"check": run_check, "micro": run_micro, "956m": run_steps, "4096": run_steps, "curves": run_curves}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=DEFAULT_PARTS)
    parser.add_argument("--variants", nargs="+", help="recipes by name (default: those of each part that fit the time)")
    parser.add_argument("--seconds", type=float, default=480, help="time limit of the whole run (default: 480)")
    parser.add_argument("--steps", type=int, default=5, help="timed steps per round (default: 5)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of all variants (default: 3)")
    parser.add_argument("--losses", type=int, default=10, help="steps whose losses are compared (default: 10)")
    parser.add_argument("--curve-steps", type=int, default=300, help="steps of each loss curve (default: 300)")
    parser.add_argument(
        "--curve-variants", nargs="+", default=CURVE_VARIANTS, type=curve_variant, metavar="NAME[_seedN]",
        help=f"recipes whose losses are compared, the baseline first (default: {' '.join(CURVE_VARIANTS)}); "
        "_seedN draws other initial parameters",
    )  # fmt: skip
    parser.add_argument("--layers", type=int, help="number of layers, in place of the model's own")
    parser.add_argument("--write", help="a file for the results as JSON")
    parser.add_argument("--hlo", help="a folder for the steps' compiled programs")
    parser.add_argument("--compile-only", action="store_true", help="compile for an H200 that need not be there")
    parser.add_argument("--tiny", action="store_true", help="small sizes that run on a CPU")
    parser.add_argument("--batch", type=int, default=16, help=argparse.SUPPRESS)
    parser.add_argument("--seq", type=int, default=2048, help=argparse.SUPPRESS)
    parser.add_argument("--one", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, default=math.inf, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.deadline = time.time() + args.seconds
    return args


if __name__ == "__main__":
    main()
