"""Forms of a gradient's reduce-scatter that the v5p compiler keeps, or turns into an all-reduce.

    python benchmarks/scatter_forms.py                                   # needs libtpu, but no TPU
    python benchmarks/scatter_forms.py --target v5p:4x4x8 --mesh fsdp:128

Compiles the scatter of a matrix by rows, for several widths, and as pieces along a separate dim.
"""

from __future__ import annotations

import argparse
import re
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from measure import table

from meshwright.parallel import local_map
from meshwright.parallel.overlap.forms import overlap_options
from meshwright.plan.compiled.topology import mesh_on_target

ROWS, FEATURES = 4096, (4096, 11008, 11264, 12288, 28672)


def main() -> None:
    args = arguments()
    mesh = mesh_on_target(args.target, args.mesh)
    rows = []
    for features in args.features:
        for name, form in (("rows", by_rows), ("pieces", by_pieces)):
            rows.append((f"{args.rows}x{features}", name, made_of(form, mesh, (args.rows, features))))
    print(f"{args.target}, {args.mesh}, float32")
    print(table(("gradient", "form", "compiled to"), rows))


def by_rows(x: Any) -> Any:
    return lax.psum_scatter(x, "fsdp", scatter_dimension=0, tiled=True)


def by_pieces(x: Any) -> Any:
    ways = lax.axis_size("fsdp")
    return lax.psum_scatter(x.reshape(ways, x.shape[0] // ways, *x.shape[1:]), "fsdp", scatter_dimension=0)


def made_of(form: Any, mesh: Any, shape: tuple[int, int]) -> str:
    """Returns the collectives of the compiled program and whether they are asynchronous."""
    # Doubled, so that the gradient is not an argument of the program. Unchecked, because nothing sums over dp here.
    run = local_map(
        lambda x: form(2 * x[0]), mesh=mesh, in_specs=P(mesh.axis_names), out_specs=P("fsdp"), check_vma=False
    )
    whole = (mesh.size, *shape)
    x = jax.ShapeDtypeStruct(whole, jnp.float32, sharding=NamedSharding(mesh, P(mesh.axis_names)))
    text = jax.jit(run, compiler_options=overlap_options(mesh)).lower(x).compile().as_text()
    kinds = sorted(set(re.findall(r"\b(all-reduce|reduce-scatter|all-to-all)(?:-start)?\(", text)))
    return " and ".join(kinds) + (", asynchronous" if "-start" in text else ", synchronous")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="v5p:16x16x4")
    parser.add_argument("--mesh", default="dp:4,fsdp:256")
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--features", type=int, nargs="*", default=list(FEATURES))
    return parser.parse_args()


if __name__ == "__main__":
    main()
