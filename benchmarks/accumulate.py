"""Bytes and memory of gradient accumulation by sync mode and number of minibatches, on eight simulated devices.

Reads bytes of collectives (loops counted by their trips) and temporary memory from the compiled programs. The baseline
`jit` is plain JAX: `jit` over global arrays with a scan over minibatches.

usage: python benchmarks/accumulate.py [--layers 8] [--width 128] [--rows 512] [--minibatches 1 2 8] [--json]
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from measure import machine, table, verdict, versions

import meshwright as mw
from meshwright.parallel import local_map
from meshwright.plan.compiled.collectives import read_schedule
from meshwright.train import Accumulated, accumulate

MESHES = ("dp:8", "fsdp:8", "dp:2,fsdp:4")
MODES = ("every", "hybrid", "once", "jit")
KINDS = ("all-gather", "reduce-scatter", "all-reduce")


def loss_fn(params: Any, batch: Any, rng: Any) -> Any:
    for kernel in params.values():
        batch = jnp.tanh(batch @ kernel)
    return (batch.sum(), batch.shape[0]), {}


def our_step(mesh: Any, specs: Any, rows: P, sync: Any, num_minibatches: int) -> Any:
    return jax.jit(
        local_map(
            lambda params, batch: accumulate(
                loss_fn, params, batch, num_minibatches=num_minibatches, specs=specs, sync=sync
            ),
            mesh=mesh,
            in_specs=(specs, rows),
            out_specs=Accumulated(loss=P(), grads=specs, metrics=P()),
        )
    )


def plain_step(mesh: Any, specs: Any, rows: P, num_minibatches: int) -> Any:
    def step(params: Any, batch: Any) -> Any:
        # Every minibatch takes rows from all devices, so that none idles.
        parts = batch.reshape(-1, num_minibatches, batch.shape[-1]).swapaxes(0, 1)
        parts = lax.with_sharding_constraint(parts, NamedSharding(mesh, P(None, *rows)))

        def body(sums: Any, part: Any) -> Any:
            more = jax.value_and_grad(lambda params: loss_fn(params, part, None)[0][0])(params)
            return jax.tree.map(jnp.add, sums, more), None

        zeros = (jnp.float32(0), jax.tree.map(jnp.zeros_like, params))
        (loss, grads), _ = lax.scan(body, zeros, parts)
        return loss / batch.shape[0], jax.tree.map(lambda leaf: leaf / batch.shape[0], grads)

    placed = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    return jax.jit(
        step,
        in_shardings=(placed, NamedSharding(mesh, rows)),
        out_shardings=(NamedSharding(mesh, P()), placed),
    )


def measure(mesh_text: str, mode: str, num_minibatches: int, args: argparse.Namespace) -> dict[str, Any]:
    mesh = mw.create_mesh(mesh_text)
    split = P("fsdp") if "fsdp" in mesh.axis_names else P()
    specs = {f"layer{i}": split for i in range(args.layers)}
    rows = P(tuple(mesh.axis_names))
    step = (
        plain_step(mesh, specs, rows, num_minibatches)
        if mode == "jit"
        else our_step(mesh, specs, rows, mode, num_minibatches)
    )
    params = {name: jax.ShapeDtypeStruct((args.width, args.width), jnp.float32) for name in specs}
    compiled = step.lower(params, jax.ShapeDtypeStruct((args.rows, args.width), jnp.float32)).compile()
    found = read_schedule(compiled.as_text()).collectives
    moved = {kind: sum(c.trips * c.bytes_moved for c in found if c.kind == kind) for kind in KINDS}
    return {
        "mesh": mesh_text,
        "mode": mode,
        "minibatches": num_minibatches,
        **moved,
        "other": sum(c.trips * c.bytes_moved for c in found if c.kind not in KINDS),
        "temp": compiled.memory_analysis().temp_size_in_bytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--minibatches", type=int, nargs="+", default=[1, 2, 8])
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    args = parser.parse_args()
    mw.simulate_cpu_devices(8)
    figures = [measure(mesh, mode, k, args) for mesh in MESHES for mode in MODES for k in args.minibatches]
    whole = args.layers * args.width**2 * 4

    def of(mesh: str, mode: str) -> list[dict[str, Any]]:
        return [row for row in figures if row["mesh"] == mesh and row["mode"] == mode]

    constant = all(
        max(sum(row[kind] for kind in KINDS) for row in of(mesh, "once"))
        == min(sum(row[kind] for kind in KINDS) for row in of(mesh, "once"))
        for mesh in MESHES
    )

    def accumulator(mesh: str, mode: str) -> int:
        ways = 1 if mode == "once" or "fsdp" not in mesh else int(mesh.split("fsdp:")[1])
        return int(whole // ways * 1.01)  # 1% for scalars: loss, count, loop counter

    grows_little = all(
        row["temp"] - of(mesh, mode)[0]["temp"] <= accumulator(mesh, mode)
        for mesh in MESHES
        for mode in MODES[:3]
        for row in of(mesh, mode)
    )
    if args.json:
        print(json.dumps({"machine": machine(), "parameters": whole, "figures": figures}, indent=1))
        sys.exit(0 if constant and grows_little else 1)
    print(", ".join(f"{name} {version}" for name, version in versions("meshwright", "jax").items()))
    print(f"machine: {machine()}, 8 simulated devices")
    print(
        f"{args.layers} layers of {args.width} x {args.width} float32 ({whole / 1024:.0f} KiB), {args.rows} rows; KiB\n"
    )
    names = ("mesh", "mode", "minibatches", *KINDS, "other", "temp")
    print(table(names, [[v if isinstance(v, str) else _number(k, v) for k, v in row.items()] for row in figures]))
    print()
    print(verdict("mode once: bytes exchanged do not depend on the number of minibatches", constant))
    print(verdict("memory beyond one minibatch: at most one float32 accumulator", grows_little))
    sys.exit(0 if constant and grows_little else 1)


def _number(name: str, value: int) -> str:
    return str(value) if name == "minibatches" else f"{value / 1024:.0f}"


if __name__ == "__main__":
    main()
