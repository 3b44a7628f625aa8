"""Gradients of one train step on the GPU against float32 on the CPU, over a table of options.

    PYTHONPATH=src python3 benchmarks/gpu_gradients.py                  # a GPU; about four minutes
    PYTHONPATH=src python3 benchmarks/gpu_gradients.py --only xlstm     # cases whose names match a regex
    PYTHONPATH=src python3 benchmarks/gpu_gradients.py --tiny           # small sizes; without a GPU, CPU against CPU

Tests on a CPU never reach cuDNN, Pallas kernels or cuBLAS. Each case is a whole train step, compiled as in training,
with an optimizer that keeps the gradients. The reference is the same model in float32 on the CPU without any of the
options: no kernels, no remat, one minibatch, a mask instead of document lengths. A case's difference is that of its
worst leaf, |gpu - cpu| / |cpu|. The implementations that a case used are read from its compiled program. Exits with 1
if a case fails or exceeds its tolerance.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import re
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from measure import machine, table, versions

import meshwright as mw
from meshwright.models import XLSTM, Decoder, Execution
from meshwright.train import Fp8, Precision, init_state, language_job, make_train_step, state_layout

SIZES = {"vocab_size": 1024, "num_layers": 2, "d_model": 256, "num_heads": 4, "d_ff": 512}
TINY = {"vocab_size": 128, "num_layers": 2, "d_model": 64, "num_heads": 4, "d_ff": 96}
ROWS, LENGTH, ODD_LENGTH, ODD_VOCABULARY = 4, 256, 203, 1013
TINY_LENGTH, TINY_ODD_LENGTH, TINY_ODD_VOCABULARY = 32, 27, 101

# Largest relative difference of a leaf by precision and model, with the reason, for two layers; grows with the square
# root of the number of layers.
TOLERANCES = {
    ("float32", "decoder"): (1e-4, "float32, summed in another order"),
    ("float32", "xlstm"): (2e-4, "float32, summed in another order; exponential gates amplify it"),
    ("tf32", "decoder"): (1e-2, "TF32 matmuls, XLA's default for float32, round to 10 bits"),
    ("mixed", "decoder"): (5e-2, "bfloat16 rounds to 8 bits in both passes of all layers; 2.8e-2 on a CPU"),
    ("mixed", "xlstm"): (8e-2, "bfloat16 rounds to 8 bits; exponential gates amplify it; 4.4e-2 on a CPU"),
    # Two draws of rounding errors: the emulation on the CPU is up to 2.6e-1 and 7e-1 from float32 at small sizes.
    ("fp8", "decoder"): (1.5, "times the difference of the same step, emulated on the CPU, from float32"),
    ("fp8", "xlstm"): (1.5, "times the difference of the same step, emulated on the CPU, from float32"),
}
HEADINGS = ("case", "precision", "difference", "allowed", "worst leaf", "loss", "attention", "norm", "head norm")
HEADINGS += ("loss path", "stack", "cell", "matmuls", "result")
PARTS = ("attention", "norm", "head norm", "loss", "stack", "cell", "matmuls")
# All projections in fp8 here, although these are narrower than those that gain from it.
FP8 = Precision(compute="bfloat16", fp8=Fp8(scaling="current", least_dim=16))
IN_FP8 = (
    "decoder, heads of 64", "grouped heads", "packed, by lengths", "odd length", "odd vocabulary", "soft caps",
    "remat dots", "remat full", "minibatches", "global view", "without kernels", "six layers, stacked by a kernel",
    "many at once", "xlstm, keys of 32", "xlstm, keys of 64", "xlstm, packed", "xlstm, minibatches",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, its data and the options of the step on the GPU; the reference shares only model and data."""

    name: str
    model: str = "decoder"
    sizes: tuple[tuple[str, Any], ...] = ()
    odd_length: bool = False
    odd_vocabulary: bool = False
    packed: bool = False
    lengths: bool = True  # attention gets document lengths; otherwise a mask
    remat: str = "none"
    num_minibatches: int = 1
    view: str = "local"
    kernels: bool | None = None
    layers: str = "auto"
    precision: str = "mixed"

    @property
    def data(self) -> tuple[Any, ...]:
        """The fields that the reference depends on."""
        return self.model, self.sizes, self.odd_length, self.odd_vocabulary, self.packed


def main() -> None:
    args = arguments()
    chosen = [case for case in cases() if re.search(args.only, f"{case.name}, {case.precision}")]
    if args.list:
        print("\n".join(f"{case.name}, {case.precision}" for case in chosen))
        return
    device = jax.devices()[0]
    print(f"{device.device_kind} against float32 on the CPU; {machine()}; {versions('jax', 'optax')}", flush=True)
    start = time.perf_counter()
    results = compare(chosen, device, tiny=args.tiny, threads=args.threads)
    print(table(HEADINGS, [row(result) for result in results]))
    for kind, (allowed, reason) in TOLERANCES.items():
        print(f"allowed for {' '.join(kind)}: {allowed:.2g} ({reason})")
    failed = [result for result in results if result["result"] != "ok"]
    print(f"{len(results) - len(failed)} of {len(results)} cases agree, in {time.perf_counter() - start:.0f} s")
    for result in failed:
        print(f"FAILED {result['case']}, {result['precision']}: {result.get('error') or result['difference']}")
    if args.write:
        Path(args.write).write_text(json.dumps(results, indent=1) + "\n")
    sys.exit(1 if failed or not results else 0)


def cases() -> list[Case]:
    eight, grouped = (("num_heads", 8),), (("num_heads", 8), ("num_kv_heads", 2))
    caps = (("attention_soft_cap", 20.0), ("logit_soft_cap", 10.0))
    window = (("sliding_window", 24), ("layer_pattern", "lg"))
    found = [
        Case("decoder, heads of 64"),
        Case("heads of 32", sizes=eight),
        Case("heads of 128", sizes=(("num_heads", 2),)),
        Case("heads of 256, too large for cuDNN", sizes=(("num_heads", 1),)),
        Case("grouped heads", sizes=grouped),
        Case("packed, by lengths", packed=True),
        Case("packed, by a mask", packed=True, lengths=False),
        Case("packed, grouped heads", packed=True, sizes=grouped),
        Case("odd length", odd_length=True),
        Case("odd length, packed, by lengths", odd_length=True, packed=True),
        Case("odd length, packed, by a mask", odd_length=True, packed=True, lengths=False),
        Case("odd vocabulary", odd_vocabulary=True),
        Case("soft caps", sizes=caps),
        Case("soft caps, packed", sizes=caps, packed=True),
        Case("sliding window", sizes=window),
        Case("sliding window, packed, by lengths", sizes=window, packed=True),
        Case("sliding window, packed, by a mask", sizes=window, packed=True, lengths=False),
        Case("norms of queries, tied embeddings", sizes=(("qk_norm", True), ("tied_embeddings", True))),
        Case("remat dots", remat="dots"),
        Case("remat full", remat="full"),
        Case("remat offload", remat="offload"),
        Case("minibatches", num_minibatches=2),
        Case("global view", view="global"),
        Case("global view, packed", view="global", packed=True),
        Case("without kernels", kernels=False),
        Case("six layers, stacked by a kernel", sizes=(("num_layers", 6),)),
        Case("layers in a loop", layers="scan"),
        Case(
            "many at once",
            sizes=grouped,
            packed=True,
            odd_length=True,
            odd_vocabulary=True,
            remat="dots",
            num_minibatches=2,
        ),
    ]
    xlstm = functools.partial(Case, model="xlstm")
    found += [
        xlstm("xlstm, keys of 32"),
        xlstm("xlstm, keys of 64", sizes=(("num_heads", 2),)),
        xlstm("xlstm, keys as wide as values, chunks of 64", sizes=(("qk_factor", 1.0), ("chunk_size", 64))),
        xlstm("xlstm, packed", packed=True),
        xlstm("xlstm, odd length and vocabulary", odd_length=True, odd_vocabulary=True),
        xlstm("xlstm, soft cap of logits, none of gates", sizes=(("logit_soft_cap", 10.0), ("gate_soft_cap", None))),
        xlstm("xlstm, remat full", remat="full"),
        xlstm("xlstm, minibatches", num_minibatches=2),
        xlstm("xlstm, global view, packed", view="global", packed=True),
        xlstm("xlstm, without kernels", kernels=False),
    ]
    both = [dataclasses.replace(case, precision=precision) for case in found for precision in ("float32", "mixed")]
    narrow = [dataclasses.replace(case, precision="fp8") for case in found if case.name in IN_FP8]
    return [*both, *narrow, Case("decoder, heads of 64", precision="tf32")]


# --- Compiling and running ---


def compare(chosen: list[Case], device: Any, *, tiny: bool, threads: int) -> list[dict[str, Any]]:
    """Returns a result for each case. Programs are traced sequentially and compiled in parallel."""
    cpu = jax.devices("cpu")[0]
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        references: dict[Any, Any] = {}
        for case in chosen:
            if case.data not in references:
                plain = Case("reference", *case.data, lengths=False, kernels=False, layers="scan", precision="float32")
                references[case.data] = prepare(plain, cpu, pool, tiny=tiny)
        for case in [case for case in chosen if case.precision == "fp8"]:
            if (key := ("fp8", *case.data)) not in references:
                plain = Case("emulation", *case.data, lengths=False, kernels=False, layers="scan", precision="fp8")
                references[key] = prepare(plain, cpu, pool, tiny=tiny)
        prepared = [attempt(prepare, case, device, pool, tiny=tiny) for case in chosen]
        true: dict[Any, Any] = {}
        results = []
        for case, program in zip(chosen, prepared, strict=True):
            if case.data not in true:
                true[case.data] = references[case.data].run()
            found = program if isinstance(program, Exception) else attempt(program.run)
            emulated = None
            if case.precision == "fp8":
                if (key := ("fp8", *case.data)) not in true:
                    true[key] = references[key].run()
                emulated = true[key]
            results.append(judge(case, found, true[case.data], emulated))
            print(json.dumps(results[-1]), file=sys.stderr, flush=True)
    return results


@dataclasses.dataclass(frozen=True)
class Program:
    """A step that is being compiled, with its inputs."""

    compiled: concurrent.futures.Future[Any]
    state: Any
    batch: Any

    def run(self) -> dict[str, Any]:
        compiled = self.compiled.result()
        state, metrics = compiled(self.state, self.batch)
        return {
            "loss": float(metrics["loss"]),
            "grads": jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), state.opt_state),
            "text": compiled.as_text(),
        }


def prepare(case: Case, device: Any, pool: concurrent.futures.Executor, *, tiny: bool) -> Program:
    job, batch = make_job(case, tiny=tiny)
    optimizer, mesh = keep_gradients(), mw.create_mesh("dp:1", devices=[device])
    precision = {"mixed": "mixed", "fp8": FP8}.get(case.precision, "float32")
    layout = state_layout(job, optimizer, mesh, precision=precision)
    step = make_train_step(
        job,
        optimizer,
        layout,
        view=case.view,
        num_minibatches=case.num_minibatches,
        precision=precision,
        remat=case.remat,
        donate=False,
    )
    exact = jax.default_matmul_precision("highest") if case.precision == "float32" else contextlib.nullcontext()
    with exact:
        lowered = step.lower(batch)
    state = jax.device_put(make_state(job, optimizer), layout.shardings)
    return Program(pool.submit(lowered.compile), state, step.place(batch))


def make_job(case: Case, *, tiny: bool) -> tuple[Any, dict[str, Any]]:
    sizes = (TINY if tiny else SIZES) | dict(case.sizes)
    if case.odd_vocabulary:
        sizes["vocab_size"] = TINY_ODD_VOCABULARY if tiny else ODD_VOCABULARY
    even, odd = (TINY_LENGTH, TINY_ODD_LENGTH) if tiny else (LENGTH, ODD_LENGTH)
    shape: dict[str, Any] = {"batch_size": ROWS, "num_tokens": odd if case.odd_length else even, "packed": case.packed}
    model = (Decoder if case.model == "decoder" else XLSTM)(**sizes)
    batch = language_job(model, **shape).make_batch(0)
    pieces = None
    if case.packed:
        batch["segment_ids"][0, -5:] = batch["weights"][0, -5:] = 0  # padding
        pieces = 1 + int((np.diff(batch["segment_ids"], axis=1) != 0).sum(axis=1).max())
    run = Execution(max_segments=pieces if case.lengths else None, kernels=case.kernels, layers=case.layers)
    return language_job(model, run=run, **shape), batch


def make_state(job: Any, optimizer: Any) -> Any:
    """Returns the initial state, computed on the CPU, with scales other than one and input gates partly open.

    With fully open input gates, a document's first output is a value's direction times a sign, whose gradient is
    unbounded if the query is orthogonal to the key. Then no two precisions agree on any device.
    """
    cpu = jax.devices("cpu")[0]
    with jax.default_device(cpu):
        layout = state_layout(job, optimizer, mw.create_mesh("dp:1", devices=[cpu]))
        state = init_state(job, optimizer, layout, jax.random.key(0))
        leaves, structure = jax.tree.flatten(state.params)
        keys = jax.random.split(jax.random.key(1), len(leaves))
        noisy = [leaf + 0.02 * jax.random.normal(key, leaf.shape) for leaf, key in zip(leaves, keys, strict=True)]
        params = structure.unflatten(noisy)
        if "mlstm" in params["layers"]:
            params["layers"]["mlstm"]["i_bias"] += 4.0
    return dataclasses.replace(state, params=params)


def keep_gradients() -> optax.GradientTransformation:
    """Returns an optimizer that stores the last gradients and updates nothing."""

    def zeros(tree: Any) -> Any:
        return jax.tree.map(jnp.zeros_like, tree)

    return optax.GradientTransformation(zeros, lambda grads, state, params=None: (zeros(grads), grads))


def attempt(function: Any, *args: Any, **options: Any) -> Any:
    """Returns a function's result or its exception, so that one failing case does not hide the others."""
    try:
        return function(*args, **options)
    except Exception as error:
        return error


# --- Judging ---


def judge(case: Case, found: Any, true: dict[str, Any], emulated: dict[str, Any] | None = None) -> dict[str, Any]:
    allowed = TOLERANCES[case.precision, case.model][0] * (dict(case.sizes).get("num_layers", 2) / 2) ** 0.5
    if emulated is not None:
        allowed = TOLERANCES[case.precision, case.model][0] * max(
            differences(emulated["grads"], true["grads"]).values()
        )
    result: dict[str, Any] = {"case": case.name, "precision": case.precision, "allowed": allowed}
    if isinstance(found, Exception):
        return result | {"result": "FAILED", "error": f"{type(found).__name__}: {str(found).splitlines()[0]}"}
    apart = differences(found["grads"], true["grads"])
    worst = max(apart, key=lambda name: np.inf if np.isnan(apart[name]) else apart[name])
    of_loss = abs(found["loss"] - true["loss"]) / abs(true["loss"])
    agrees = apart[worst] <= allowed and of_loss <= allowed  # false for NaN
    return result | {
        "difference": apart[worst],
        "worst": worst,
        "loss": of_loss,
        "leaves": apart,
        "paths": paths(found["text"]),
        "result": "ok" if agrees else "FAILED",
    }


def differences(found: Any, true: Any) -> dict[str, float]:
    """Returns |found - true| / |true| for each leaf.

    A gate's bias acts like one more row of the gate's weight. If its gradient is smaller than an average row's, it is
    compared with that row. This applies to input gates, because each head's norm cancels a factor shared by all writes.
    """
    leaves = {"/".join(str(key.key) for key in path): leaf for path, leaf in jax.tree.leaves_with_path(true)}
    sizes = {name: float(np.linalg.norm(leaf)) for name, leaf in leaves.items()}
    for name in leaves:
        gate = name.replace("_bias", "_gate")
        if gate != name:
            sizes[name] = max(sizes[name], sizes[gate] / leaves[gate].shape[-2] ** 0.5)
    pairs = zip(leaves.items(), jax.tree.leaves(found), strict=True)
    return {name: float(np.linalg.norm(actual - leaf)) / sizes[name] for (name, leaf), actual in pairs}


CALL = re.compile(r'custom_call_target="(?P<target>[^"]*)".*?(?:op_name="(?P<scope>[^"]*)"|$)', re.MULTILINE)


def paths(text: str) -> dict[str, str]:
    """Returns the implementations that a compiled program uses, by part of the model."""
    calls = [(match["target"], match["scope"] or "") for match in CALL.finditer(text)]
    kernels = Counter(name for _, scope in calls for name in re.findall(r"(\w+)\)*/(?:pallas_call|mpmd_map)", scope))

    def kernel(name: str) -> str:
        return f"Pallas x{kernels[name]}" if kernels[name] else "XLA"

    return {
        "attention": attention_path(text, [target for target, _ in calls]),
        "norm": kernel("residual_norm_gradient"),
        "head norm": kernel("gated_head_norm_gradient"),
        "loss": kernel("softmax_gradient"),
        "stack": kernel("stack"),
        "cell": kernel("mlstm_outputs"),
        "matmuls": matmul_path(text, [target for target, _ in calls]),
    }


def attention_path(text: str, targets: list[str]) -> str:
    found = [target for target in targets if "fmha" in target]
    if not found:
        return "XLA"
    line = next(line for line in text.splitlines() if "fmha" in line)
    form = "mask" if any("Bias" in target for target in found) else "causal"
    if "PADDING_CAUSAL" in line:
        form = "lengths"
    logits = re.search(r'"dimensions":\s*\["\d+",\s*"\d+",\s*"(\d+)"', line)
    return f"cuDNN {form} x{len(found)}" + (f", {logits[1]} positions" if logits else "")


def matmul_path(text: str, targets: list[str]) -> str:
    counts = Counter(target.removeprefix("__") for target in targets if "cublas" in target)
    counts["Triton"] = len(re.findall(r'"kind":"__triton[a-z_]*gemm[a-z_]*"', text))
    counts["XLA"] = len(re.findall(r"= \S+ dot\(", text))
    return ", ".join(f"{name} x{count}" for name, count in counts.items() if count) or "none"


def row(result: dict[str, Any]) -> list[str]:
    first = [result["case"], result["precision"]]
    if "error" in result:
        empty = [""] * (len(PARTS) - 1)
        return [*first, "", f"{result['allowed']:.0e}", "", "", result["error"][:60], *empty, result["result"]]
    used = result["paths"]
    return [
        *first,
        f"{result['difference']:.1e}",
        f"{result['allowed']:.0e}",
        result["worst"],
        f"{result['loss']:.1e}",
        *(used[part] for part in PARTS),
        result["result"],
    ]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="regex for the name and precision of cases to run")
    parser.add_argument("--threads", type=int, default=8, help="number of compile threads (default: 8)")
    parser.add_argument("--write", help="JSON file for the results, with every leaf's difference")
    parser.add_argument("--list", action="store_true", help="print the names of the cases and exit")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to test the script")
    return parser.parse_args()


if __name__ == "__main__":
    main()
