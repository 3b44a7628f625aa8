"""Step time of the 956M decoder on one GPU with AdamW, with Muon, and with optax's Muon on the same matrices.

    PYTHONPATH=src python3 benchmarks/muon_h200.py

First, iterations on matrices of 2048 x 5632 and 2048 x 2048 are compared with float32, and timed. Then all programs are
compiled, and take turns in a random order, `--steps` synchronized steps each round, with states of their own. The
variant *XLA* uses no kernel for symmetric products, *plain* neither that nor the Gram form. `--tiny` runs small sizes
on a CPU, to test the script. `--losses` trains a small decoder for 300 steps with each instead. `--bytes` needs no GPU,
but JAX's CUDA plugin: it compiles the updates of a decoder with two such layers for an H200, and counts the bytes that
their kernels move.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import random
import statistics
import time
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from decoder_h200 import SIZES, TINY
from measure import machine, table, versions
from traffic import kernels_of

import meshwright as mw
from meshwright.models import Decoder
from meshwright.plan.compiled.topology import mesh_on_target
from meshwright.train import init_state, language_job, make_eval_step, make_train_step, muon, state_layout
from meshwright.train.optimizer import newton_schulz as iterations
from meshwright.train.optimizer.muon import is_hidden_matrix
from meshwright.train.optimizer.newton_schulz import COEFFICIENTS, DION_COEFFICIENTS, newton_schulz
from meshwright.tree import named_tree_map

RATE, LIMIT = 1e-4, 1.10
FIVE = {"num_iterations": 5, "coefficients": (COEFFICIENTS,)}  # as optax's
WITHOUT = {"XLA": {"can_mirror": lambda *_, **__: False}}  # replaced in the module of the iterations
WITHOUT["plain"] = WITHOUT["XLA"] | {"_TOGETHER": 1}


def optax_muon() -> Any:
    """Returns `optax.contrib.muon` with the matrices that ours chooses."""
    matrix = optax.contrib.MuonDimensionNumbers(-2, -1)

    def numbers(params: Any) -> Any:
        return named_tree_map(
            lambda name, leaf: matrix if is_hidden_matrix(name, leaf) else None,
            params,
            sep="/",
        )

    return optax.contrib.muon(RATE, consistent_rms=0.2, muon_weight_dimension_numbers=numbers)


OPTIMIZERS = {
    "adamw": lambda: optax.adamw(RATE),
    "muon": lambda: muon(RATE),
    "muon, XLA": lambda: muon(RATE),
    "muon, plain": lambda: muon(RATE),
    "muon, 5 iterations": lambda: muon(RATE, **FIVE),
    "optax.contrib.muon": optax_muon,
}


def without(name: str) -> Any:
    """Returns a context that leaves out parts of the iterations while a program is traced."""
    changes = WITHOUT.get(name.removeprefix("muon, "))
    return mock.patch.multiple(iterations, **changes) if changes else contextlib.nullcontext()


def check_iterations(args: argparse.Namespace) -> None:
    """Compares iterations on random matrices of falling singular values with float32, and times them."""
    rows, count = (256, 2) if args.tiny else (2048, 16)
    iterate = functools.partial(newton_schulz, num_iterations=4, coefficients=DION_COEFFICIENTS)  # as muon does
    mesh = mw.create_mesh("dp:1", devices=1)
    lines = []
    for columns in (rows, 11 * rows // 4):
        left, right = (jax.random.normal(jax.random.key(i), (count, n, n)) for i, n in enumerate((rows, columns)))
        x = (left / jnp.arange(1, rows + 1)) @ right[:, :rows]
        with jax.default_matmul_precision("highest"):
            true = jax.jit(iterate)(x)
        for name, dtype in (("muon", "bfloat16"), ("muon, XLA", "bfloat16"), ("muon, plain", "bfloat16")):
            with without(name), jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
                # A new function for each form, because JAX keeps traces by function.
                run = jax.jit(lambda x: iterate(x)).lower(x.astype(dtype)).compile()
            found = run(x.astype(dtype))
            apart = float(jnp.linalg.norm(found.astype(jnp.float32) - true) / jnp.linalg.norm(true))
            begun = time.perf_counter()
            for _ in range(5):
                found = run(x.astype(dtype))
            found.block_until_ready()
            taken = (time.perf_counter() - begun) / 5
            flops = 4 * count * rows**2 * (4 * columns + 2 * rows)
            shape, rate = f"{count} of {rows} x {columns}", f"{flops / taken / 1e12:.0f}"
            lines.append([shape, name, f"{apart:.1e}", f"{1e3 * taken:.2f}", rate])
    print(table(("matrices", "form", "from float32", "ms", "TFLOP/s of the plain form"), lines), flush=True)


def compare_losses(args: argparse.Namespace) -> None:
    """Trains a small decoder on the standard library's sources with each optimizer, and prints held-out losses."""
    count, rows, length = (6, 4, 32) if args.tiny else (300, 16, 128)
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    text = np.frombuffer(b"\n".join(path.read_bytes() for path in files), np.uint8).astype(np.int32)
    text = text[: len(text) // (length + 1) * (length + 1)].reshape(-1, length + 1)
    job = language_job(Decoder.named("small"), batch_size=rows, num_tokens=length)
    rates: dict[str, Any] = {"adamw": (3e-3, {}), "muon": (1e-2, {}), "muon, 5 iterations": (1e-2, FIVE)}
    lines = []
    for name, (rate, options) in rates.items():
        schedule = optax.warmup_cosine_decay_schedule(0.0, rate, 20, 300, rate / 10)
        make: Any = optax.adamw if name == "adamw" else muon
        optimizer = make(schedule, weight_decay=0.1, **options)
        layout = state_layout(job, optimizer, mw.create_mesh("dp:1", devices=1))
        step = make_train_step(job, optimizer, layout, precision="mixed", clip=1.0)
        evaluate = make_eval_step(job, layout, precision="mixed")
        found = []
        for seed in (0, 1, 2):
            order = np.random.default_rng(seed).permutation(len(text))
            batches = [text[order[i * rows : (i + 1) * rows]] for i in range(count + 40)]
            given = [{"inputs": batch[:, :-1], "targets": batch[:, 1:]} for batch in batches]
            state = init_state(job, optimizer, layout, jax.random.key(seed))
            for batch in given[:count]:
                state, _ = step(state, batch)
            found.append(statistics.fmean(float(evaluate(state, batch)["loss"]) for batch in given[count:]))
        lines.append([name, f"{rate:g}", *(f"{loss:.4f}" for loss in found), f"{statistics.fmean(found):.4f}"])
    print(table(("optimizer", "rate", "seed 0", "seed 1", "seed 2", "mean held-out loss"), lines), flush=True)


def count_bytes(args: argparse.Namespace) -> None:
    """Prints what the clipped updates of two layers move, per parameter of the layers, without embedding and head."""
    model = Decoder(**((TINY if args.tiny else SIZES) | {"num_layers": 2}))
    mesh = mesh_on_target("h200:1x1", "dp:1")
    whole = jax.NamedSharding(mesh, jax.P())
    abstract = jax.eval_shape(model.init, jax.random.key(0))["layers"]
    count, lines = sum(leaf.size for leaf in jax.tree.leaves(abstract)), []
    for name in args.only or ("adamw", "muon"):
        optimizer = optax.with_extra_args_support(OPTIMIZERS[name]())

        def step(params: Any, state: Any, grads: Any, optimizer: Any = optimizer) -> Any:
            grads = jax.tree.map(lambda leaf: leaf * jnp.minimum(1.0, 1.0 / optax.global_norm(grads)), grads)
            specs = jax.tree.map(lambda _: jax.P(), params)
            updates, state = optimizer.update(grads, state, params, specs=specs)
            return optax.apply_updates(params, updates), state

        states = jax.eval_shape(optimizer.init, abstract)
        given = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole), (abstract, states, abstract)
        )
        with without(name), jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            text = jax.jit(step, donate_argnums=(0, 1)).lower(*given).compile().as_text()
        kernels = kernels_of(text)
        products = [one for one in kernels if one.is_matmul or "symmetric_product" in one.operation]
        moved, by_products = (sum(one.moved for one in part) / count for part in (kernels, products))
        lines.append([name, len(kernels), f"{moved - by_products:.2f}", f"{by_products:.2f}"])
    print(f"{count / 1e6:.0f}M parameters of layers, compiled for an H200; {versions('jax', 'optax')}")
    print(table(("optimizer", "kernels", "bytes per parameter", "bytes of matmuls"), lines))


def main() -> None:
    args = arguments()
    if args.losses:
        compare_losses(args)
        return
    if args.bytes:
        count_bytes(args)
        return
    check_iterations(args)
    sizes, rows, tokens = (TINY, 4, 32) if args.tiny else (SIZES, 16, 2048)
    job = language_job(Decoder(**sizes), batch_size=rows, num_tokens=tokens)
    mesh = mw.create_mesh("dp:1", devices=1)
    programs, states, peaks, batch = {}, {}, {}, None
    for name in args.only or OPTIMIZERS:
        optimizer = OPTIMIZERS[name]()
        layout = state_layout(job, optimizer, mesh)
        step = make_train_step(job, optimizer, layout, precision="mixed", clip=1.0)
        batch = step.place(job.make_batch(0))
        with without(name):
            programs[name] = step.lower(batch).compile()
        peaks[name] = programs[name].memory_analysis().peak_memory_in_bytes
        states[name] = init_state(job, optimizer, layout, jax.random.key(0))
        print(f"{name}: compiled", flush=True)
    times: dict[str, list[float]] = {name: [] for name in programs}
    losses = dict.fromkeys(programs, 0.0)
    order, draw = list(programs), random.Random(0)
    for number in range(1 + args.rounds):
        draw.shuffle(order)
        for name in order:
            for _ in range(args.steps):
                start = time.perf_counter()
                states[name], metrics = programs[name](states[name], batch)
                losses[name] = float(metrics["loss"])
                if number:  # the first round warms up
                    times[name].append(time.perf_counter() - start)
    base = statistics.median(times["adamw"])
    print(f"{machine()}; {versions('jax', 'jaxlib', 'optax')}")
    lines = [
        [name, f"{1e3 * statistics.median(found):.1f}", f"{statistics.median(found) / base:.3f}",
         f"{peaks[name] / 2**30:.1f}", f"{losses[name]:.3f}"]
        for name, found in times.items()
    ]  # fmt: skip
    print(table(("optimizer", "ms", "over adamw", "peak GiB", "last loss"), lines))
    if "muon" not in times:
        return
    ratio = statistics.median(times["muon"]) / base
    print(f"muon over adamw {ratio:.3f}, at most {LIMIT:.2f}: {'met' if ratio <= LIMIT else 'MISSED'}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=OPTIMIZERS, help="optimizers (default: all; with adamw)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="steps of each optimizer in a round")
    parser.add_argument("--losses", action="store_true", help="only compare held-out losses of a small decoder")
    parser.add_argument("--bytes", action="store_true", help="only count bytes of updates compiled for an H200")
    parser.add_argument("--tiny", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
