"""One GPU: the train step with `precision="fp8"` beside the bfloat16 step: results, speed, memory, dtypes and losses.

    PYTHONPATH=src python3 benchmarks/fp8_h200.py                          # one H200; about four minutes
    PYTHONPATH=src python3 benchmarks/fp8_h200.py --parts curves           # loss curves; about three minutes per seed
    PYTHONPATH=src python3 benchmarks/fp8_h200.py --tiny                   # small sizes on a CPU

Parts:

- check: one product of the library and its gradients against float64 on the same fp8 values, and one step of a small
  decoder on the GPU against the same step, emulated, on the CPU of the same machine.
- 956m, 4096: the train step (forward, backward, AdamW; float32 parameters) of the 956M decoder at 16 x 2048 tokens, and
  of one with d 4096, ff 14336 and 8 layers. Losses of `--losses` steps from the same state on the same text; then times
  in turns, `--rounds` rounds in a drawn order, each of one step to warm up and `--steps` timed steps.
- curves (only if named): trains the 956M decoder for `--curve-steps` steps on Python sources, one byte per token, with
  warmup, cosine decay and clipping, for each of `--seeds` (initial parameters and order of rows) once in bfloat16 and
  once in fp8. Prints losses of every tenth step. `--shared N` takes N steps in bfloat16 first, from which all variants
  continue: in the first steps, bfloat16 runs from parameters 2^-9 apart (`bf16_again`) come up to 8% apart.

How each matmul really runs is read from the compiled program (`meshwright.plan.compiled.fp8_matmuls`). `--seconds`
limits the whole run: what no longer fits is skipped, and said.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import random
import statistics
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from measure import machine, table, verdict, versions

import meshwright as mw
from meshwright.models import Decoder
from meshwright.parallel import Fp8Weight, column_dense
from meshwright.parallel.fp8.casting import E4M3, E5M2, scale_of
from meshwright.plan.compiled.fp8_matmuls import Fp8Check, check_fp8
from meshwright.train import Fp8, Precision, init_state, language_job, make_gradients, make_train_step, state_layout

SIZES = {
    "956m": {"vocab_size": 32768, "num_layers": 16, "d_model": 2048, "num_heads": 16, "d_ff": 5632},
    "4096": {"vocab_size": 32768, "num_layers": 8, "d_model": 4096, "num_heads": 32, "d_ff": 14336},
}
TINY = {
    "956m": {"vocab_size": 256, "num_layers": 2, "d_model": 64, "num_heads": 2, "d_ff": 96},
    "4096": {"vocab_size": 256, "num_layers": 1, "d_model": 64, "num_heads": 2, "d_ff": 128},
}
PRECISIONS = {
    "bf16": Precision.named("mixed"),
    "fp8": Precision.named("fp8"),
    "bf16_again": Precision.named("mixed"),  # from slightly other parameters, for the spread of equal runs
    "fp8_current": Precision(compute="bfloat16", fp8=Fp8(scaling="current")),
}
VARIANTS = {"956m": ("bf16", "fp8", "fp8_current"), "4096": ("bf16", "fp8")}
TARGETS = {"956m": 1.30, "4096": 1.45}
PARTS = ("check", "956m", "4096", "curves")
BOUND = 5e-3  # of the loss of bf16
GIB = 2**30


def main() -> None:
    args = arguments()
    if args.cache:
        jax.config.update("jax_compilation_cache_dir", args.cache)
    print(f"{machine()}; {jax.devices()[0].device_kind}; {versions('jax', 'jaxlib', 'optax')}", flush=True)
    results: list[dict[str, Any]] = []
    runs = {"check": run_check, "956m": run_steps, "4096": run_steps, "curves": run_curves}
    for part in args.parts:
        start = time.time()
        print(f"\n# {part}, {args.deadline - start:.0f} s left", flush=True)
        results += runs[part](args, part)
        print(f"({part}: {time.time() - start:.0f} s)", flush=True)
        if args.write:
            Path(args.write).write_text(json.dumps(results, indent=1) + "\n")


# --- check ---


def rounded(x: Any, amax: float, dtype: Any) -> Any:
    """Returns the fp8 values of an array, in float64."""
    import ml_dtypes

    name = {E4M3: ml_dtypes.float8_e4m3fn, E5M2: ml_dtypes.float8_e5m2}[dtype]
    top, scale = float(jnp.finfo(dtype).max), float(scale_of(jnp.float32(amax), dtype))
    return np.clip(np.asarray(x, np.float32) / scale, -top, top).astype(name).astype(np.float64) * scale


def apart(got: Any, want: Any) -> float:
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def run_check(args: argparse.Namespace, part: str) -> list[dict[str, Any]]:
    results = []
    rows, k, n = (64, 32, 48) if args.tiny else (4096, 2048, 1024)
    keys = jax.random.split(jax.random.key(0), 3)
    x, w, g = (
        jax.random.normal(key, shape, jnp.bfloat16) * size
        for key, shape, size in zip(keys, [(rows, k), (k, n), (rows, n)], [1.0, k**-0.5, 1e-3], strict=True)
    )
    known = jnp.array([3.0, jnp.abs(w).max(), 2e-3], jnp.float32)  # some inputs and gradients saturate
    for scaling in ("delayed", "current"):

        def both(x: Any, w: Any, known: Any, g: Any, scaling: Any = scaling) -> Any:
            def product(x: Any, w: Any, known: Any) -> Any:
                return column_dense(x, Fp8Weight(w, known, scaling=scaling, name="w"), axis=None)

            y, pull = jax.vjp(product, x, w, known)
            return y, *pull(g)

        options = {"xla_gpu_enable_triton_gemm": False} if on_gpu() else None
        compiled = jax.jit(both, compiler_options=options).lower(x, w, known, g).compile()
        y, dx, dw, found = compiled(x, w, known, g)
        own = [float(jnp.abs(a).astype(jnp.float32).max()) for a in (x, w, g)]
        used = [float(a) for a in known] if scaling == "delayed" else own
        used[1] = float(known[1])
        x8, w8, g8 = (rounded(a, amax, kind) for a, amax, kind in zip((x, w, g), used, (E4M3, E4M3, E5M2), strict=True))
        wanted = {"y": (y, x8 @ w8), "dx": (dx, g8 @ w8.T), "dw": (dw, x8.T @ g8)}
        errors = {name: apart(got, want) for name, (got, want) in wanted.items()}
        from_exact = apart(y, np.asarray(x, np.float64) @ np.asarray(w, np.float64))
        check = check_fp8(compiled.as_text(), ["w"], emulates=jax.default_backend() != "gpu")
        amaxes = found.tolist() == [own[0], 0.0, own[2]]
        # Products are rounded to bfloat16: 2**-9 of each at most, and the unit's sums lose some more.
        met = max(errors.values()) < 4e-3 and amaxes and (check.is_fp8 or not on_gpu()) and from_exact > 1e-2
        shown = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
        text = f"{scaling}: {shown} from float64 on the same fp8 values; y {from_exact:.1e} from the exact product"
        print(verdict(f"{text}; amaxes {'agree' if amaxes else 'DIFFER'}; {check.line()}", met), flush=True)
        results.append({"part": part, "name": scaling, **errors, "met": met})
    return [*results, *step_on_both(args, part)]


def step_on_both(args: argparse.Namespace, part: str) -> list[dict[str, Any]]:
    """Compares gradients and amaxes of one step on the GPU with those of the emulation on the CPU."""
    if not on_gpu():
        return []
    model = Decoder(vocab_size=512, num_layers=2, d_model=256, num_heads=4, d_ff=512)
    job = language_job(model, batch_size=8, num_tokens=256)
    batch, optimizer, found = job.make_batch(0), optax.sgd(0.1), {}
    params = jax.device_get(job.init(jax.random.key(0)))
    for name, device, precision in (
        ("gpu", jax.devices()[0], "fp8"),
        ("cpu", jax.devices("cpu")[0], "fp8"),
        ("float32", jax.devices("cpu")[0], "float32"),
    ):
        mesh = mw.create_mesh("dp:1", devices=[device])
        layout = state_layout(job, optimizer, mesh, precision=precision)
        gradients = make_gradients(job, layout, precision=precision)

        def run(params: Any, batch: Any, mesh: Any = mesh, gradients: Any = gradients) -> Any:
            with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
                result, _ = gradients(params, batch, None)
            return result.loss, result.grads, None if result.fp8 is None else result.fp8.tree

        options = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_dot_merger_threshold_mb": 0} if name == "gpu" else None
        placed = jax.device_put((params, batch), device)
        found[name] = jax.device_get(jax.jit(run, compiler_options=options)(*placed))
    errors = [apart(a, b) for a, b in zip(*(jax.tree.leaves(found[name][1]) for name in ("gpu", "cpu")), strict=True)]
    rough = [apart(a, b) for a, b in zip(*(jax.tree.leaves(found[n][1]) for n in ("gpu", "float32")), strict=True)]
    amaxes = [np.abs(a / b - 1).max() for a, b in zip(*(
        jax.tree.leaves(jax.tree.map(lambda leaf: leaf[..., [0, 2]], found[name][2])) for name in ("gpu", "cpu")
    ), strict=True)]  # fmt: skip
    losses = {name: float(result[0]) for name, result in found.items()}
    # Each rounds bfloat16 in its own way, which flips roundings to fp8: they differ like two draws of errors.
    met = (
        all(a <= 2**0.5 * b for a, b in zip(errors, rough, strict=True))
        and abs(losses["gpu"] / losses["cpu"] - 1) < 1e-3
    )
    text = (
        f"a decoder's step: loss {losses}; gradients on the GPU at most {max(errors):.1e} from the CPU's emulation "
        f"(median {statistics.median(errors):.1e}); from float32 {max(rough):.1e} (median "
        f"{statistics.median(rough):.1e}); amaxes at most {max(amaxes):.1e} from the emulation's"
    )
    print(verdict(text, met), flush=True)
    return [{"part": part, "name": "step", "errors": errors, "from_float32": rough, "losses": losses, "met": met}]


# --- The train step ---


def on_gpu() -> bool:
    return jax.default_backend() == "gpu"


class Variant:
    """A train step in one precision. States of variants are alike but for the scaling state."""

    def __init__(self, args: argparse.Namespace, name: str, sizes: dict[str, int]) -> None:
        self.name, self.precision = name, PRECISIONS[name]
        if args.tiny and self.precision.fp8 is not None:
            fp8 = dataclasses.replace(self.precision.fp8, least_dim=16)
            self.precision = dataclasses.replace(self.precision, fp8=fp8)
        self.tokens = args.minibatches * args.batch * args.seq
        self.job = language_job(Decoder(**sizes), batch_size=args.minibatches * args.batch, num_tokens=args.seq)
        self.optimizer = optax.adamw(schedule(args), b1=0.9, b2=0.95, weight_decay=0.1)
        mesh = mw.create_mesh("dp:1", devices=jax.devices()[:1])
        self.layout = state_layout(self.job, self.optimizer, mesh, precision=self.precision)
        options = {"precision": self.precision, "clip": 1.0, "num_minibatches": args.minibatches}
        self.step = make_train_step(self.job, self.optimizer, self.layout, **options)
        start = time.time()
        self.compiled = self.step.lower(self.job.batch).compile()
        self.seconds = time.time() - start
        self.peak = self.compiled.memory_analysis().peak_memory_in_bytes / GIB
        names = () if self.precision.fp8 is None else self.precision.fp8.names(self.layout.abstract.params)
        text = self.compiled.as_text()
        if args.hlo:
            Path(args.hlo, f"{sizes['d_model']}-{name}.hlo").write_text(text)
        self.check = check_fp8(text, names, emulates=jax.default_backend() != "gpu")
        self.times: list[float] = []
        self.losses: list[float] = []
        print(f"{name}: compiled in {self.seconds:.0f} s, peak {self.peak:.2f} GiB; {self.check.line()}", flush=True)
        for line in self.check.warnings():
            print(f"warning: {line}", flush=True)

    def begin(self, seed: int = 0, start: Any = None) -> Any:
        """Returns the initial state, or that of `start` with a scaling state that knows nothing."""
        key = jax.random.key(seed)
        state = init_state(self.job, self.optimizer, self.layout, key, precision=self.precision)
        if start is not None:
            scaling = state.fp8
            del state
            state = dataclasses.replace(jax.tree.map(copied, start), fp8=scaling)
        if self.name != "bf16_again":
            return state
        # Changes of the size of bfloat16's rounding.
        turn = jax.jit(lambda leaf: leaf * (1 + 2**-9 * jax.random.normal(jax.random.key(1), leaf.shape)))
        return dataclasses.replace(state, params=jax.tree.map(turn, state.params))

    def run(self, state: Any, batches: list[Any]) -> tuple[Any, list[float], list[float]]:
        times, losses = [], []
        for batch in batches:
            start = time.perf_counter()
            state, metrics = self.compiled(state, batch)
            losses.append(float(metrics["loss"]))
            times.append(time.perf_counter() - start)
        return state, times, losses

    def ms(self) -> float:
        return 1e3 * statistics.median(self.times)


def copied(leaf: Any) -> Any:
    """Returns a copy, so that the original survives when a step donates it."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(jnp.copy(jax.random.key_data(leaf)))
    return jnp.copy(leaf)


def schedule(args: argparse.Namespace) -> Any:
    steps = max(args.shared + args.curve_steps, args.warmup + 1)
    return optax.warmup_cosine_decay_schedule(0.0, args.rate, args.warmup, steps, args.rate / 10)


def sizes_of(args: argparse.Namespace, part: str) -> dict[str, int]:
    if args.tiny:
        args.batch, args.seq = 2, 16
    sizes = dict((TINY if args.tiny else SIZES)[part])
    return sizes | ({"num_layers": args.layers} if args.layers else {})


def run_steps(args: argparse.Namespace, part: str) -> list[dict[str, Any]]:
    sizes = sizes_of(args, part)
    ready: list[Variant] = []
    texts: list[Any] = []
    for name in args.variants or VARIANTS[part]:
        if ready and time.time() + 2.5 * ready[-1].seconds > args.deadline:
            print(f"{name}: skipped, too little time is left", flush=True)
            continue
        variant = Variant(args, name, sizes)
        texts = texts or [variant.step.place(batch) for batch in text_batches(args, sizes["vocab_size"], args.losses)]
        state, times, variant.losses = variant.run(variant.begin(), texts)
        variant.scaling = jax.device_get(state.fp8)  # a warm history, for the timed steps
        shared = dataclasses.replace(state, fp8=None)
        shown = " ".join(f"{loss:.4f}" for loss in variant.losses)
        print(f"  {1e3 * statistics.median(times):.1f} ms at first; losses {shown}", flush=True)
        ready.append(variant)
        if variant is not ready[0]:
            del shared  # one state is timed by all variants in turn
        else:
            kept = shared
        del state
    state, rng = kept, random.Random(0)
    del kept
    for number in range(args.rounds):
        for variant in rng.sample(ready, len(ready)):
            own = dataclasses.replace(state, fp8=jax.tree.map(jnp.asarray, variant.scaling))
            own, times, _ = variant.run(own, [texts[0]] * (args.steps + 1))
            state = dataclasses.replace(own, fp8=None)
            variant.times += times[1:]
        print(f"round {number + 1}: " + ", ".join(f"{v.name} {v.ms():.1f}" for v in ready), flush=True)
    results = [summary(part, variant, ready[0]) for variant in ready]
    rows = [
        [r["name"], f"{r['ms']:.1f}", f"{r['low']:.1f}-{r['high']:.1f}", f"{r['ratio']:.3f}",
         f"{r['tokens_per_s']:.0f}", f"{r['peak_GiB']:.1f}",
         f"{r['in_fp8']} of {r['wanted']}", f"{r['losses'][-1]:.4f}", f"{r['loss_apart']:.1e}"]
        for r in results
    ]  # fmt: skip
    headings = ["variant", "ms", "range", "of bf16", "tokens/s", "peak GiB", "in fp8", "last loss", "apart"]
    print(table(headings, rows))
    for variant, result in zip(ready[1:], results[1:], strict=True):
        wanted = TARGETS[part]
        print(
            verdict(
                f"{part}: {variant.name} is {result['ratio']:.3f}x bf16 ({wanted} wanted)", result["ratio"] >= wanted
            )
        )
        peaks = f"{part}: {variant.name} {variant.peak:.1f} GiB at the peak, bf16 {ready[0].peak:.1f}"
        print(verdict(peaks, variant.peak <= ready[0].peak))
        print(matmul_table(variant.check))
    return results


def summary(part: str, variant: Variant, first: Variant) -> dict[str, Any]:
    uses = [use for use in variant.check.uses if use.role]
    return {
        "part": part, "name": variant.name, "ms": variant.ms(), "low": 1e3 * min(variant.times),
        "high": 1e3 * max(variant.times), "ratio": first.ms() / variant.ms(), "peak_GiB": variant.peak,
        "tokens_per_s": variant.tokens / variant.ms() * 1e3, "compile_s": variant.seconds,
        "in_fp8": sum(use.runs for use in uses if use.is_fp8), "wanted": sum(use.runs for use in uses),
        "matmuls": [dataclasses.asdict(use) for use in variant.check.uses], "losses": variant.losses,
        "loss_apart": max(abs(a - b) / b for a, b in zip(variant.losses, first.losses, strict=True)),
    }  # fmt: skip


def matmul_table(check: Fp8Check) -> str:
    rows = [
        [use.name, use.role, use.runs, use.kind, use.how, "precise" if use.is_precise else ""] for use in check.uses
    ]
    return table(["parameter", "role", "runs", "dtypes", "call", "accumulation"], rows)


def text_batches(args: argparse.Namespace, vocab_size: int, count: int) -> list[dict[str, Any]]:
    """Returns batches of bytes of the standard library's sources, each seen once."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    text = np.frombuffer(b"\n".join(path.read_bytes() for path in files), np.uint8).astype(np.int32) % vocab_size
    num_rows = args.minibatches * args.batch
    size = num_rows * (args.seq + 1)
    rows = [np.resize(text[i * size :], size).reshape(num_rows, -1) for i in range(count)]
    return [{"inputs": row[:, :-1], "targets": row[:, 1:]} for row in rows]


# --- curves ---


def run_curves(args: argparse.Namespace, part: str) -> list[dict[str, Any]]:
    sizes, count = sizes_of(args, "956m"), args.curve_steps
    print(f"{sizes}; {args.batch} x {args.seq} tokens; {count} steps, {args.warmup} of them warmup", flush=True)
    variants = {name: Variant(args, name, sizes) for name in args.variants or ("bf16", "fp8")}
    results: list[dict[str, Any]] = []
    for seed in args.seeds:
        batches = curve_batches(args, sizes["vocab_size"], args.shared + count, seed)
        start = None
        if args.shared:
            first = variants["bf16"]
            state, _, losses = first.run(first.begin(seed), [first.step.place(one) for one in batches[: args.shared]])
            start = dataclasses.replace(state, fp8=None)
            del state
            print(f"{args.shared} shared steps, seed {seed}: loss {losses[0]:.4f} to {losses[-1]:.4f}", flush=True)
        for variant in variants.values():
            if variant.name == "bf16_again" and seed not in (args.control or args.seeds):
                continue
            pace = statistics.median(variant.times) if variant.times else 0.2
            if not args.tiny and time.time() + count * pace > args.deadline:
                print(f"{variant.name}, seed {seed}: skipped, {args.deadline - time.time():.0f} s left", flush=True)
                continue
            state, losses = variant.begin(seed, start), []
            for batch in batches[args.shared :]:
                begun = time.perf_counter()
                state, metrics = variant.compiled(state, variant.step.place(batch))
                losses.append(float(metrics["loss"]))
                variant.times.append(time.perf_counter() - begun)
            skipped = int(state.skipped)
            del state
            results.append({"part": part, "name": variant.name, "seed": seed, "losses": losses, "ms": variant.ms()})
            shown = " ".join(f"{losses[step - 1]:.4f}" for step in tenths(count))
            print(f"{variant.name}, seed {seed}: {variant.ms():.1f} ms a step, {skipped} skipped; {shown}", flush=True)
            if args.write:
                Path(args.write).write_text(json.dumps(results) + "\n")
    judge_curves(results, count)
    return results


def tenths(count: int) -> list[int]:
    return [*range(10, count + 1, 10)] if count >= 20 else [*range(1, count + 1)]


def judge_curves(results: list[dict[str, Any]], count: int) -> None:
    curves = {(result["name"], result["seed"]): result["losses"] for result in results}
    seeds = sorted({seed for name, seed in curves if name == "bf16"})
    rows, apart_of_means = [], []
    pairs = [seed for seed in seeds if ("fp8", seed) in curves]
    for step in tenths(count):
        plain = {seed: curves["bf16", seed][step - 1] for seed in seeds}
        narrow = {seed: curves["fp8", seed][step - 1] for seed in pairs}
        cells = [f"{plain[seed]:.4f} / {narrow[seed]:.4f} ({narrow[seed] / plain[seed] - 1:+.2%})" for seed in pairs]
        spread = (max(plain.values()) - min(plain.values())) / statistics.fmean(plain.values())
        mean = statistics.fmean(narrow.values()) / statistics.fmean(plain[s] for s in pairs) - 1 if pairs else math.nan
        apart_of_means.append((step, mean, spread, [narrow[s] / plain[s] - 1 for s in pairs]))
        rows.append([step, *cells, f"{mean:+.2%}", f"{spread:.2%}"])
    headings = ["step", *(f"seed {seed}: bf16 / fp8" for seed in pairs), "means", "spread of bf16 seeds"]
    print(table(headings, rows))
    for name in ("bf16_again", "fp8_current"):
        for seed in [seed for seed in seeds if (name, seed) in curves]:
            parts = [curves[name, seed][step - 1] / curves["bf16", seed][step - 1] - 1 for step in tenths(count)]
            late = parts[len(parts) // 2 :]
            print(
                f"{name}, seed {seed}: at most {max(map(abs, parts)):.2%} from bf16 at tenth steps; in the last half "
                f"{max(map(abs, late)):.2%}, on average {statistics.fmean(late):+.2%}"
            )
    for what, chosen in (("all", apart_of_means), ("the last half", apart_of_means[len(apart_of_means) // 2 :])):
        largest = max(abs(mean) for _, mean, _, _ in chosen)
        each = max((abs(part) for *_, parts in chosen for part in parts), default=math.nan)
        spread = max(spread for _, _, spread, _ in chosen)
        average = statistics.fmean(mean for _, mean, _, _ in chosen)
        text = (
            f"curves, {what} tenth steps, {len(pairs)} seeds: means at most {largest:.2%} apart (on average "
            f"{average:+.2%}), one seed at most {each:.2%}; bf16 seeds spread up to {spread:.2%} ({BOUND:.1%} wanted)"
        )
        print(verdict(text, largest <= BOUND), flush=True)


def curve_batches(args: argparse.Namespace, vocab_size: int, count: int, seed: int) -> list[dict[str, Any]]:
    """Returns batches of rows of Python sources in an order drawn by the seed, one byte per token.

    The standard library comes first; packages follow if it is too short for a single pass.
    """
    wanted, length, parts = count * args.batch * (args.seq + 1), args.seq + 1, []
    for module in (os, jax, np, optax):
        folder = Path(str(module.__file__)).parent
        for path in sorted(folder.rglob("*.py")):
            if path.is_file() and "site-packages" not in path.relative_to(folder).parts:
                parts.append(path.read_bytes())
        if sum(map(len, parts)) >= wanted:
            break
    text = np.frombuffer(b"\n".join(parts), np.uint8)
    rows = text[: len(text) // length * length].reshape(-1, length)
    rng = np.random.default_rng(seed)
    passes = -(-count * args.batch // len(rows))
    order = np.concatenate([rng.permutation(len(rows)) for _ in range(passes)])
    if seed == args.seeds[0]:
        print(f"{len(text) / 1e6:.1f} MB of text; {count * args.batch / len(rows):.2f} passes", flush=True)
    chosen = [rows[order[i * args.batch :][: args.batch]].astype(np.int32) % vocab_size for i in range(count)]
    return [{"inputs": batch[:, :-1], "targets": batch[:, 1:]} for batch in chosen]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS[:3])
    parser.add_argument("--variants", nargs="+", choices=PRECISIONS, help="precisions (default: those of each part)")
    parser.add_argument("--seconds", type=float, default=480, help="time limit of the whole run (default: 480)")
    parser.add_argument("--steps", type=int, default=5, help="timed steps per round (default: 5)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of all variants (default: 3)")
    parser.add_argument("--minibatches", type=int, default=1, help="minibatches of --batch rows (default: 1)")
    parser.add_argument("--losses", type=int, default=10, help="steps whose losses are compared (default: 10)")
    parser.add_argument("--curve-steps", type=int, default=300, help="steps of each loss curve (default: 300)")
    parser.add_argument("--shared", type=int, default=0, help="steps in bfloat16 before curves part (default: 0)")
    parser.add_argument("--control", type=int, nargs="+", help="seeds of bf16_again (default: those of --seeds)")
    parser.add_argument("--rate", type=float, default=3e-4, help="peak learning rate (default: 3e-4)")
    parser.add_argument("--warmup", type=int, default=100, help="steps of warmup (default: 100)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds of curves (default: 0 1 2)")
    parser.add_argument("--layers", type=int, help="number of layers, in place of the model's own")
    parser.add_argument("--write", help="a file for the results as JSON")
    parser.add_argument("--hlo", help="a folder for the steps' compiled programs")
    parser.add_argument("--cache", help="a folder for JAX's compilation cache")
    parser.add_argument("--tiny", action="store_true", help="small sizes that run on a CPU")
    parser.add_argument("--batch", type=int, default=16, help=argparse.SUPPRESS)
    parser.add_argument("--seq", type=int, default=2048, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.minibatches > 1 and "curves" in args.parts:
        parser.error("--minibatches is for the timed parts, not for curves")
    args.deadline = time.time() + args.seconds
    return args


if __name__ == "__main__":
    main()
