"""Time and values of the mLSTM cell on one GPU, forward, and forward with backward: the XLA form and the kernels.

    PYTHONPATH=src python3 benchmarks/mlstm_h200.py --values --steps 10 --write mlstm.json
    PYTHONPATH=src python3 benchmarks/mlstm_h200.py --tiny --values         # small shapes, on a CPU as well

Inputs are random: q, k and v in bfloat16, gates in float32. All programs of a shape are compiled in parallel and warmed
up. Then they run in rounds, in a new random order each round, so that no program always runs on a cooler or hotter
chip. A call's time is the mean of `--inner` calls; the table has medians over rounds. The last columns are relative to
the default chunk size of the XLA form, which `mlstm_chunkwise` chooses by chip. The row *kernels* is what
`mlstm_chunkwise` uses by default, which is the XLA form on other chips than Hopper GPUs.

`--heads` compares h and the gradients of every head of the chosen shapes with float32, for the kernels and for the XLA
form, names the token with the largest share of the difference, and compares the float32 mode with the recurrence.
`--values` compares h and the five gradients of the kernels, without and with documents, with float32: the first row's
first head and the last row's last head with `mlstm_chunkwise` in float32 with exact matmuls, and for the first shape
with `mlstm_recurrent` too. All rows and heads are compared with the XLA form in bfloat16. `--steps` adds train steps of
an 813M xLSTM with chunks of twice the key size (XLA), and with the default.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from measure import machine, table, versions

from meshwright.models import init_mlstm_state, mlstm_chunkwise, mlstm_recurrent

# B, S, H, K, V
SHAPES = [
    (4, 8192, 4, 256, 512),
    (4, 8192, 8, 256, 512),
    (8, 8192, 16, 128, 256),
    (1, 32768, 4, 256, 512),
    (1, 32768, 8, 256, 512),
    (2, 32768, 16, 128, 256),
]
TINY_SHAPES = [(2, 64, 2, 8, 16)]
CHUNK_SIZES = (64, 128, 256, 384, 512)
TINY_CHUNK_SIZES = (16,)
Size = int | str | None  # a chunk size of the XLA form, None for its default, or "kernels"
DIRECTIONS = ("forward", "both")
NAMES = ("h", "q", "k", "v", "i", "f")
NUM_DOCUMENTS, BLOCK = 6, 32
TOLERANCE = 2e-2
MODEL = {"vocab_size": 50304, "num_layers": 12, "d_model": 2048, "num_heads": 4, "d_ff": 5504}
TINY_MODEL = {"vocab_size": 128, "num_layers": 1, "d_model": 32, "num_heads": 2, "d_ff": 64}


def main() -> None:
    args = arguments()
    shapes = TINY_SHAPES if args.tiny else [SHAPES[number] for number in args.shapes]
    sizes: list[Size] = [*(TINY_CHUNK_SIZES if args.tiny else args.chunks), None, "kernels"]
    device = jax.devices()[0]
    print(f"{device.device_kind}; {machine()}; {versions('jax', 'jaxlib')}", flush=True)
    results: list[dict[str, Any]] = []
    if args.heads:
        for shape in shapes:
            results += check_heads(shape)
            if args.write:
                Path(args.write).write_text(json.dumps(results, indent=1) + "\n")
        check_float32(shapes[0])
        return
    for number, shape in enumerate(shapes):
        programs = compile_shape(shape, sizes, args)
        values = check_values(shape, programs, exactly=number == 0) if args.values else []
        results += [*values, *time_shape(shape, sizes, programs, args)]
        if args.write:  # after every shape, so that a later failure loses nothing
            Path(args.write).write_text(json.dumps(results, indent=1) + "\n")
    print(f"medians of {args.rounds} rounds of {args.inner} calls, bfloat16, milliseconds")
    timed = [result for result in results if "values" not in result]
    headings = ["B, S, H, K, V", "chunk", "forward", "range", "and backward", "range", "peak GiB", "of default", ""]
    print(table(headings, [row(result, timed) for result in timed]))
    for shape in shapes:
        here = [result for result in timed if result["shape"] == list(shape) and "both" in result]
        if here:
            best = min(here, key=lambda result: result["both"])
            print(f"{shape}: fastest chunk size {best['chunk'] or 'default'}, {best['both']:.2f} ms")
    if args.steps:
        results += time_steps(compile_steps(args), args)
    if args.write:
        Path(args.write).write_text(json.dumps(results, indent=1) + "\n")
    sys.exit(1 if any("error" in result or result.get("met") is False for result in results) else 0)


def compile_shape(shape: tuple[int, ...], sizes: list[Size], args: argparse.Namespace) -> dict[Any, Any]:
    """Returns a compiled and warmed up program, or its error, for each chunk size and direction."""
    inputs = make_inputs(shape)
    documents = make_documents(shape)
    found: dict[Any, Any] = {}
    with concurrent.futures.ThreadPoolExecutor(args.threads) as pool:
        pending = {
            (size, direction): pool.submit(make_program(size, direction).lower(*inputs).compile)
            for size in sizes
            for direction in DIRECTIONS
        }
        if args.values:
            program = make_program("kernels", "both", documents)
            pending["kernels", "documents"] = pool.submit(program.lower(*inputs).compile)
        for key, compiled in pending.items():
            try:
                found[key] = compiled.result()
                jax.block_until_ready(found[key](*inputs))
            except Exception as error:
                found[key] = error
    return found


def time_shape(
    shape: tuple[int, ...], sizes: list[Size], programs: dict[Any, Any], args: argparse.Namespace
) -> list[dict[str, Any]]:
    inputs = make_inputs(shape)
    errors = {key[0]: str(one).splitlines()[0][:80] for key, one in programs.items() if isinstance(one, Exception)}
    keys = [(size, direction) for size in sizes for direction in DIRECTIONS if size not in errors]
    times: dict[tuple[Size, str], list[float]] = {key: [] for key in keys}
    for number in range(args.rounds):
        random.Random(number).shuffle(keys)
        for key in keys:
            program = programs[key]
            start = time.perf_counter()
            for _ in range(args.inner):
                out = program(*inputs)
            jax.block_until_ready(out)
            times[key].append((time.perf_counter() - start) / args.inner * 1e3)
    return [result_of(shape, size, programs, times, errors) for size in sizes]


def result_of(
    shape: tuple[int, ...], size: Size, programs: dict[Any, Any], times: dict[Any, Any], errors: dict[Any, str]
) -> dict[str, Any]:
    result: dict[str, Any] = {"shape": list(shape), "chunk": size}
    if size in errors:
        return result | {"error": errors[size]}
    for direction in DIRECTIONS:
        values = times[size, direction]
        result |= {direction: statistics.median(values), f"{direction}_range": [min(values), max(values)]}
    memory = programs[size, "both"].memory_analysis()
    return result | {"peak_bytes": getattr(memory, "peak_memory_in_bytes", 0)}


def make_program(size: Size, direction: str, segment_ids: Any = None) -> Any:
    options: dict[str, Any] = {} if size == "kernels" else {"chunk_size": size, "kernels": False}
    cell: Any = functools.partial(mlstm_chunkwise, segment_ids=segment_ids, **options)
    return jax.jit(lambda *args: cell(*args[:5])) if direction == "forward" else jax.jit(with_gradients(cell))


def with_gradients(cell: Any) -> Any:
    """Returns a function of q, k, v, both gates and the gradient of h that returns h and the five gradients."""

    def both(*args: Any) -> tuple[Any, ...]:
        *inputs, d_h = args
        h, pull = jax.vjp(cell, *inputs)
        return h, *pull(d_h)

    return both


def make_inputs(shape: tuple[int, ...]) -> tuple[Any, ...]:
    """Returns q, k, v, both gates, and the gradient of the output."""
    rows, length, heads, keys, values = shape
    dims = [keys, keys, values, values]

    @jax.jit
    def draw(key: Any) -> Any:
        q, k, v, d_h = (
            jax.random.normal(jax.random.fold_in(key, i), (rows, length, heads, dim), jnp.bfloat16)
            for i, dim in enumerate(dims)
        )
        gates = jax.random.normal(jax.random.fold_in(key, 4), (2, rows, length, heads))
        return q, k, v, gates[0] - 2.0, gates[1] + 4.0, d_h

    return jax.block_until_ready(draw(jax.random.key(0)))


def make_documents(shape: tuple[int, ...]) -> Any:
    """Returns the documents of every row, and padding after them."""
    rng, (rows, length, *_) = np.random.default_rng(0), shape
    starts = np.sort(rng.integers(1, length, (rows, NUM_DOCUMENTS)), axis=1)
    ids = 1 + (np.arange(length)[None, :, None] >= starts[:, None, :]).sum(axis=-1)
    return jnp.asarray(np.where(ids > NUM_DOCUMENTS, 0, ids), jnp.int32)


def row(result: dict[str, Any], results: list[dict[str, Any]]) -> list[str]:
    first = [", ".join(map(str, result["shape"])), str(result["chunk"] or "default")]
    if "error" in result:
        return [*first, result["error"], "", "", "", "", "", ""]
    default = next(one for one in results if one["shape"] == result["shape"] and one["chunk"] is None)
    cells = []
    for direction in DIRECTIONS:
        low, high = result[f"{direction}_range"]
        cells += [f"{result[direction]:.2f}", f"{low:.2f}-{high:.2f}"]
    shares = [f"{result[name] / default[name]:.3f}" if name in default else "" for name in DIRECTIONS]
    return [*first, *cells, f"{result['peak_bytes'] / 2**30:.2f}", *shares]


# --- Values ---


def check_values(shape: tuple[int, ...], programs: dict[Any, Any], *, exactly: bool) -> list[dict[str, Any]]:
    """Compares the kernels with float32 and with the XLA form; prints relative differences of h and the gradients."""
    inputs = make_inputs(shape)
    results = []
    for name, segment_ids in (("both", None), ("documents", make_documents(shape))):
        result: dict[str, Any] = {"shape": list(shape), "values": name}
        program = programs["kernels", name]
        if isinstance(program, Exception):
            results.append(result | {"error": str(program).splitlines()[0][:80]})
            continue
        found = program(*inputs)
        some = [ends(x) for x in found]
        few = [ends(x).astype(jnp.float32) for x in inputs]
        ids = jnp.ones(few[3].shape[:2], jnp.int32) if segment_ids is None else segment_ids[jnp.array([0, -1])]
        with jax.default_matmul_precision("highest"):
            chunked = functools.partial(mlstm_chunkwise, segment_ids=ids, chunk_size=64, kernels=False)
            references = {"float32": jax.jit(with_gradients(chunked))(*few)}
            if exactly:
                references["recurrence"] = jax.jit(with_gradients(functools.partial(recurrence, segment_ids=ids)))(*few)
        for what, true in references.items():
            result[what] = [apart(x, y) for x, y in zip(some, true, strict=True)]
        if exactly:
            pairs = zip(references["float32"], references["recurrence"], strict=True)
            result["float32 of recurrence"] = [apart(x, y) for x, y in pairs]
        if name == "both" and not isinstance(programs[None, "both"], Exception):
            result["bfloat16"] = [most_apart(x, y) for x, y in zip(found, programs[None, "both"](*inputs), strict=True)]
        result["met"] = all(value <= TOLERANCE for what in references for value in result[what])
        results.append(result)
        for what in [key for key in result if isinstance(result[key], list) and key != "shape"]:
            differences = " ".join(f"{of} {value:.1e}" for of, value in zip(NAMES, result[what], strict=True))
            print(f"{shape}, {name}, against {what}: {differences}", flush=True)
        print(f"{shape}, {name}: {'met' if result['met'] else 'MISSED'} ({TOLERANCE:.0e} allowed)", flush=True)
    return results


def check_heads(shape: tuple[int, ...]) -> list[dict[str, Any]]:
    """Compares each head of the kernels and of the XLA form, both in bfloat16, with float32."""
    inputs = make_inputs(shape)
    found = {name: make_program(size, "both")(*inputs) for name, size in (("kernels", "kernels"), ("XLA", None))}
    with jax.default_matmul_precision("highest"):
        exact = make_program(64, "both")
    results = []
    for head in range(shape[2]):
        few = [x[:, :, head : head + 1].astype(jnp.float32) for x in inputs]
        with jax.default_matmul_precision("highest"):
            true = exact(*few)
        for name, outs in found.items():
            mine = [x[:, :, head : head + 1] for x in outs]
            apart_by = [apart(x, y) for x, y in zip(mine, true, strict=True)]
            wrong = jnp.sum(jnp.square(mine[1].astype(jnp.float32) - true[1]), axis=(2, 3))
            row, token = np.unravel_index(int(jnp.argmax(wrong)), wrong.shape)
            share = float(wrong[row, token] / jnp.sum(wrong))
            near = size_over_floor([np.asarray(x[row, :, 0], np.float64) for x in few[:5]], int(token))
            result = {"shape": list(shape), "head": head, "form": name, "apart": apart_by}
            results.append(result | {"token": int(token), "share": share, "size_over_floor": near})
            differences = " ".join(f"{of} {value:.1e}" for of, value in zip(NAMES, apart_by, strict=True))
            text = f"token {token} has {share:.0%} of q's squared difference, its |size| / floor is {near:.4f}"
            print(f"{shape}, head {head}, {name}: {differences}; {text}", flush=True)
    return results


def size_over_floor(inputs: Any, token: int) -> float:
    """Returns |n q| / exp(-m) of one token in float64; the gradient of the denominator jumps where it is 1."""
    q, k, _, i, f = inputs
    log = np.cumsum(-np.logaddexp(0.0, -f[: token + 1]))
    weights = log[-1] - log + i[: token + 1]
    m = max(float(weights.max()), 0.0)
    size = np.sum(np.exp(weights - m) * (k[: token + 1] @ q[token])) / np.sqrt(q.shape[1])
    return float(abs(size) / np.exp(-m))


def check_float32(shape: tuple[int, ...]) -> None:
    """Compares the float32 mode, which is the XLA form, with the recurrence, over the first tokens of some heads."""
    few = [ends(x)[:, :4096].astype(jnp.float32) for x in make_inputs(shape)]
    ids = jnp.ones(few[3].shape[:2], jnp.int32)
    with jax.default_matmul_precision("highest"):
        found = make_program("kernels", "both")(*few)
        true = jax.jit(with_gradients(functools.partial(recurrence, segment_ids=ids)))(*few)
    values = [apart(x, y) for x, y in zip(found, true, strict=True)]
    differences = " ".join(f"{of} {value:.1e}" for of, value in zip(NAMES, values, strict=True))
    print(f"float32 mode, {few[0].shape} and the recurrence: {differences} ({1e-5:.0e} allowed)", flush=True)


def ends(x: Any) -> Any:
    """Returns the first row's first head and the last row's last head, `[2, S, 1, ...]`."""
    return jnp.stack([x[0, :, :1], x[-1, :, -1:]])


def recurrence(*args: Any, segment_ids: Any) -> Any:
    """`mlstm_recurrent`, whose gradient keeps the memories of one block of tokens at a time."""
    q, v = args[0], args[2]
    rows, length, heads, keys = q.shape
    block = max(length // 256, BLOCK)

    def cut(x: Any) -> Any:
        return jnp.moveaxis(x.reshape(rows, length // block, block, *x.shape[2:]), 1, 0)

    @jax.checkpoint
    def one_block(state: Any, x: Any) -> tuple[Any, Any]:
        *inputs, ids = x
        h, state = mlstm_recurrent(*inputs, state=state, segment_ids=ids)
        return state, h

    start = init_mlstm_state(rows, heads, key_dim=keys, value_dim=v.shape[-1])
    _, h = lax.scan(one_block, start, tuple(map(cut, (*args, segment_ids))))
    return jnp.moveaxis(h, 0, 1).reshape(rows, length, heads, -1)


@jax.jit
def _norms(got: Any, true: Any) -> Any:
    axes = tuple(axis for axis in range(got.ndim) if axis not in (0, 2))
    got, true = got.astype(jnp.float32), true.astype(jnp.float32)
    return jnp.sum(jnp.square(got - true), axis=axes), jnp.sum(jnp.square(true), axis=axes)


def apart(got: Any, true: Any) -> float:
    difference, size = (float(jnp.sum(x)) for x in _norms(got, true))
    return float(np.sqrt(difference / size))


def most_apart(got: Any, true: Any) -> float:
    """Returns the relative difference of the worst row and head."""
    difference, size = _norms(got, true)
    return float(jnp.max(jnp.sqrt(difference / size)))


# --- Whole train steps ---


def compile_steps(args: argparse.Namespace) -> dict[Size, Any]:
    """Returns a compiled step for each chunk size, with its job, optimizer and layout."""
    import optax

    import meshwright as mw
    from meshwright.models import XLSTM
    from meshwright.train import language_job, make_train_step, state_layout

    rows, length = (2, 40) if args.tiny else (4, 8192)
    optimizer, mesh = optax.adamw(1e-4), mw.create_mesh("dp:1", devices=1)
    sizes: dict[str, Any] = TINY_MODEL if args.tiny else MODEL
    found: dict[Size, Any] = {}
    with concurrent.futures.ThreadPoolExecutor(args.threads) as pool:
        for size in (sizes["d_model"] // sizes["num_heads"], None):
            job = language_job(XLSTM(**sizes, chunk_size=size), batch_size=rows, num_tokens=length)
            layout = state_layout(job, optimizer, mesh)
            step = make_train_step(job, optimizer, layout, precision="mixed", clip=1.0)
            batch = step.place(job.make_batch(0))
            found[size] = (pool.submit(step.lower(batch).compile), job, optimizer, layout, batch)
    return {size: (one.result(), *rest) for size, (one, *rest) in found.items()}


def time_steps(steps: dict[Size, Any], args: argparse.Namespace) -> list[dict[str, Any]]:
    from meshwright.train import init_state

    running = {
        size: (compiled, init_state(job, optimizer, layout, jax.random.key(0)), batch)
        for size, (compiled, job, optimizer, layout, batch) in steps.items()
    }
    times: dict[Size, list[float]] = {size: [] for size in running}
    losses: dict[Size, list[float]] = {size: [] for size in running}
    order = list(running)
    for number in range(3 + args.steps):
        random.Random(number).shuffle(order)
        for size in order:
            compiled, state, batch = running[size]
            start = time.perf_counter()
            state, metrics = compiled(state, batch)
            jax.block_until_ready(metrics["loss"])
            seconds = time.perf_counter() - start
            running[size] = (compiled, state, batch)
            losses[size].append(float(metrics["loss"]))
            if number >= 3:
                times[size].append(seconds * 1e3)
    found = [
        {"step_ms": statistics.median(values), "range": [min(values), max(values)], "chunk": size,
         "losses": losses[size], "peak_bytes": getattr(steps[size][0].memory_analysis(), "peak_memory_in_bytes", 0)}
        for size, values in times.items()
    ]  # fmt: skip
    print(f"train steps of an xLSTM, mixed precision; medians of {args.steps} steps")
    cells = [
        [str(one["chunk"] or "default"), f"{one['step_ms']:.1f}", "{:.1f}-{:.1f}".format(*one["range"]),
         f"{one['peak_bytes'] / 2**30:.2f}", f"{one['losses'][0]:.4f}, {one['losses'][-1]:.4f}"]
        for one in found
    ]  # fmt: skip
    print(table(["chunk", "ms", "range", "program's peak GiB", "first and last loss"], cells), flush=True)
    return found


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = range(len(SHAPES))
    parser.add_argument(
        "--shapes", type=int, nargs="+", choices=numbers, default=numbers, help="indices (default: all)"
    )
    parser.add_argument("--chunks", type=int, nargs="+", default=CHUNK_SIZES, help="chunk sizes")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--inner", type=int, default=5, help="calls per synchronization (default: 5)")
    parser.add_argument("--values", action="store_true", help="also compare values with float32")
    parser.add_argument("--heads", action="store_true", help="only compare values of every head with float32")
    parser.add_argument("--steps", type=int, default=0, help="train steps of a whole model to time (default: 0, none)")
    parser.add_argument("--threads", type=int, default=8, help="number of compile threads (default: 8)")
    parser.add_argument("--write", help="JSON file for the results, written after every shape")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to test the script")
    return parser.parse_args()


if __name__ == "__main__":
    main()
