"""One token of the mLSTM recurrence: time on one GPU, or the bytes that its compiled program moves.

    PYTHONPATH=src python3 benchmarks/mlstm_step.py           # one GPU, about two minutes
    PYTHONPATH=src python3 benchmarks/mlstm_step.py --bytes   # compiled for an H200; needs JAX's CUDA plugin, no GPU

The least that a token moves is its state, read once and written once: 2 x B x H x K x V x 4 bytes, in float32. *one
sum* is the plain form, `q C` as one sum over all keys; *parts* is `mlstm_recurrent`, which sums over parts of the keys
first if there are few rows; *kernel* is `mlstm_recurrent(kernels=True)`, the default for large states. `--tiny` runs a
small shape on a CPU, where the first two are the same matmul, and the kernel is interpreted.

Times are of `--tokens` tokens in one program with donated state, medians of `--rounds` calls of each form in a drawn
order, beside the least at 4.8 TB/s. Inputs and the first state are random, and outputs and states of all forms must
agree; otherwise the script exits with 1.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import SingleDeviceSharding
from measure import machine, table, versions
from traffic import kernels_of

from meshwright.models import MLSTMState, init_mlstm_state, mlstm, mlstm_recurrent
from meshwright.parallel.kernels import dispatch
from meshwright.plan.compiled.topology import target_devices

# B, H, K, V: heads of the xLSTMs "1b" and "7b", and smaller ones
SHAPES = [(rows, *heads) for heads in ((4, 256, 512), (8, 256, 512), (16, 128, 256)) for rows in (1, 4, 8, 32, 128)]
TINY_SHAPES = [(2, 2, 128, 128)]
RATE = 4.8e12
FORMS = {
    "one sum": (lambda q, c: jnp.sum(q[..., None] * c, axis=-2), False),
    "parts": (mlstm._sums, False),
    "kernel": (mlstm._sums, True),
}
"""How `q C` is summed, and whether the kernel is used."""
TOLERANCES = {"outputs": 2**-7, "memories": 1e-4}
"""Outputs are rounded to bfloat16; a memory in float32 is rounded a few times per token."""


def main() -> None:
    args = arguments()
    shapes = TINY_SHAPES if args.tiny else SHAPES
    print(f"{'compiled for an H200' if args.bytes else jax.devices()[0].device_kind}; {machine()}; {versions('jax')}")
    counted, timed = ["kernels", "bytes / state", "kernels with all of it"], ["us per token", "range", "of the least"]
    headings = ["B, H, K, V", "form", "state, MB", *(counted if args.bytes else timed)]
    far = []
    for shape in shapes:
        lines, apart = (count(shape), {}) if args.bytes else measure(shape, args)
        print(table(headings, lines), flush=True)
        for what, value in apart.items():
            print(
                f"{shape}: {what} of all forms at most {value:.1e} apart ({TOLERANCES[what]:.0e} allowed)", flush=True
            )
            if not value <= TOLERANCES[what]:
                far.append(f"{what} of {shape}")
    if far:
        sys.exit(f"error: forms differ in {', '.join(far)}.")


def inputs(shape: tuple[int, ...], put: Any = lambda x: x) -> tuple[Any, ...]:
    rows, heads, keys, values = shape
    made = jax.random.split(jax.random.key(0), 7)
    q, k = (jax.random.normal(key, (rows, 1, heads, keys), jnp.bfloat16) for key in made[:2])
    v = jax.random.normal(made[2], (rows, 1, heads, values), jnp.bfloat16)
    i, f = (jax.random.normal(key, (rows, 1, heads)) for key in made[3:5])
    state = init_mlstm_state(rows, heads, key_dim=keys, value_dim=values)
    numbers = (jax.random.normal(key, leaf.shape) for key, leaf in zip(made[5:], state[:2], strict=True))
    state = type(state)(*numbers, *state[2:])
    result: tuple[Any, ...] = jax.tree.map(put, (state, q, k / keys**0.5, v, i, f + 3))
    return result


def count(shape: tuple[int, ...]) -> list[list[object]]:
    sharding = SingleDeviceSharding(target_devices("h200:1x1")[0])
    abstract = jax.eval_shape(lambda: inputs(shape))
    given = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), abstract)
    lines: list[list[object]] = []
    for name, (read, kernels) in FORMS.items():

        def step(state: MLSTMState, *tokens: Any, kernels: bool = kernels) -> tuple[Any, MLSTMState]:
            return mlstm_recurrent(*tokens, state=state, kernels=kernels)

        with (
            mock.patch.object(mlstm, "_sums", read),
            mock.patch.object(dispatch, "is_interpreted", return_value=False),
        ):
            program = jax.jit(step, donate_argnums=0).lower(*given).compile()
        found = kernels_of(program.as_text())
        size = size_of(shape)
        large = [kernel for kernel in found if max(*kernel.read, *kernel.written) >= size]
        ratio = sum(kernel.moved for kernel in found) / size
        lines.append([", ".join(map(str, shape)), name, f"{size / 1e6:.1f}", len(found), f"{ratio:.2f}", len(large)])
    return lines


def measure(shape: tuple[int, ...], args: argparse.Namespace) -> tuple[list[list[object]], dict[str, float]]:
    """Returns the rows of the table, and how far the forms are apart, relative to the first."""
    state, *tokens = inputs(shape)
    programs, states, times = {}, {}, {name: list[float]() for name in FORMS}
    for name, (read, kernels) in FORMS.items():

        def run(state: MLSTMState, *tokens: Any, kernels: bool = kernels) -> Any:
            # The next query depends on the last output, as in a model.
            def token(_: Any, carry: Any) -> Any:
                state, q, h = carry
                h, state = mlstm_recurrent(q, *tokens[1:], state=state, kernels=kernels)
                return state, q + 0 * h[..., : q.shape[-1]], h

            return lax.fori_loop(0, args.tokens, token, (state, tokens[0], jnp.zeros_like(tokens[2])))

        with mock.patch.object(mlstm, "_sums", read):
            programs[name] = jax.jit(run, donate_argnums=0).lower(state, *tokens).compile()
        states[name] = jax.tree.map(jnp.copy, state)
    results = {}
    order = list(FORMS)
    for number in range(args.rounds + 1):
        random.Random(number).shuffle(order)
        for name in order:
            start = time.perf_counter()
            states[name], _, results[name] = jax.block_until_ready(programs[name](states[name], *tokens))
            if number:  # the first round warms up
                times[name].append((time.perf_counter() - start) / args.tokens * 1e6)
    apart = {"outputs": difference(results), "memories": difference({name: one[0] for name, one in states.items()})}
    least = 2 * size_of(shape) / RATE * 1e6
    return [
        [", ".join(map(str, shape)), name, f"{size_of(shape) / 1e6:.1f}", f"{statistics.median(found):.1f}",
         f"{min(found):.1f}-{max(found):.1f}", f"{statistics.median(found) / least:.2f}"]
        for name, found in times.items()
    ], apart  # fmt: skip


def difference(arrays: dict[str, Any]) -> float:
    """Returns the largest difference from the first array, relative to its size; a head counts by itself."""
    one, *others = (jnp.asarray(array, jnp.float32) for array in arrays.values())
    dims = tuple(range(2, one.ndim)) if one.ndim > 2 else (-1,)
    size = jnp.sqrt(jnp.sum(one**2, axis=dims))
    return max(float(jnp.max(jnp.sqrt(jnp.sum((other - one) ** 2, axis=dims)) / size)) for other in others)


def size_of(shape: tuple[int, ...]) -> int:
    rows, heads, keys, values = shape
    return 4 * rows * heads * keys * values


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", action="store_true", help="count the bytes of programs compiled for an H200")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--tokens", type=int, default=64, help="tokens per call (default: 64)")
    parser.add_argument("--tiny", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
