"""Measures the memory and time of exporting a checkpoint, and arrays on 8 simulated devices, as a model folder.

usage: python benchmarks/export_weights.py [--layers N] [--folder FOLDER]

Imports the 1b folder of import_weights.py (bfloat16) as a checkpoint, then exports it in a process of its own, and
exports the same weights from a mesh. Memory is the peak beyond the imports, and beyond the arrays on the mesh.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

from import_weights import SHAPES, measured, write_folder
from measure import machine, run_child, table, verdict, versions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int)
    parser.add_argument("--folder", help="folder of import_weights.py to use")
    parser.add_argument("--child", nargs=3)
    options = parser.parse_args()
    if options.child:
        kind, source, target = options.child
        print(json.dumps(CHILDREN[kind](Path(source), Path(target))))
        return
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        source = Path(options.folder or place / "hf")
        if options.folder is None:
            source.mkdir()
            sizes, shard = SHAPES["1b"]
            write_folder(source, sizes | ({"num_layers": options.layers} if options.layers else {}), shard)
        size = sum(path.stat().st_size for path in source.glob("*.safetensors"))
        command = [sys.executable, __file__, "--child"]
        run_child([*command, "import", str(source), str(place / "steps")])
        found = {"checkpoint": run_child([*command, "checkpoint", str(place / "steps"), str(place / "out")])}
        same = [path.read_bytes() == (place / "out" / path.name).read_bytes() for path in source.glob("*.safetensors")]
        shutil.rmtree(place / "out")
        found["mesh"] = run_child([*command, "mesh", str(source), str(place / "out")])
    print(", ".join(f"{name} {version}" for name, version in versions("jax", "safetensors").items()))
    print(f"machine: {machine()}; {size / 1e9:.2f} GB of weights\n")
    rows = [(kind, f"{item['seconds']:.1f}", f"{item['cpu']:.1f}", f"{item['bytes'] / 1e9:.2f}")
            for kind, item in found.items()]  # fmt: skip
    print(table(("exported from", "seconds", "CPU seconds", "peak memory in GB"), rows) + "\n")
    print(verdict("the files are those that were imported, byte for byte", all(same)))


def with_import(source: Path, target: Path) -> dict[str, float]:
    from meshwright.checkpoint.convert.import_export import import_pretrained

    return measured(lambda: import_pretrained(source, target))


def with_checkpoint(source: Path, target: Path) -> dict[str, float]:
    import jax
    from orbax.checkpoint import v1  # noqa: F401 - not part of the measurement

    from meshwright.checkpoint.convert.import_export import export_pretrained

    jax.block_until_ready(jax.device_put(0.0))
    return measured(lambda: export_pretrained(source, target, max_shard_bytes=SHAPES["1b"][1]))


def with_mesh(source: Path, target: Path) -> dict[str, float]:
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    from meshwright.checkpoint.convert.pretrained import read_pretrained, write_pretrained

    found = read_pretrained(source, mesh="fsdp:8")
    return measured(lambda: write_pretrained(target, found.model, found.params, max_shard_bytes=SHAPES["1b"][1]))


CHILDREN = {"import": with_import, "checkpoint": with_checkpoint, "mesh": with_mesh}

if __name__ == "__main__":
    main()
