"""Measures the memory and time of reading a sharded model folder onto 8 simulated devices.

usage: python benchmarks/import_weights.py [--shape 1b|7b] [--layers N] [--repeat N] [--cold] [--peer PYTHON]

Writes a Llama folder in bfloat16, then reads it in processes of their own, in turns: `read_pretrained` onto fsdp:8,
plain reads of all bytes, and `from_pretrained` of transformers if `--peer` names a Python that has it. Memory is the
peak beyond the imports of the process. `--dtype float32` casts while reading.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measure import machine, median, peak_resident, run_child, table, verdict, versions

# Sizes of a decoder, and of its files in bytes; 7b has those of Llama 2 7B.
SHAPES = {
    "1b": ({"num_layers": 8, "d_model": 2048, "num_heads": 16, "num_kv_heads": 8, "d_ff": 8192}, 200_000_000),
    "7b": ({"num_layers": 32, "d_model": 4096, "num_heads": 32, "d_ff": 11008}, 4_900_000_000),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--dtype")
    parser.add_argument("--peer", help="a Python with torch and transformers")
    parser.add_argument("--cold", action="store_true", help="drop the files from the page cache before each read")
    parser.add_argument("--folder", help="folder to keep the weights in, or to find them in")
    parser.add_argument("--child", nargs=3)
    options = parser.parse_args()
    if options.child:
        kind, folder, dtype = options.child
        print(json.dumps(CHILDREN[kind](Path(folder), dtype or None)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(options.folder or temporary)
        sizes, shard = SHAPES[options.shape]
        if not (folder / "config.json").exists():
            folder.mkdir(parents=True, exist_ok=True)
            write_folder(folder, sizes | ({"num_layers": options.layers} if options.layers else {}), shard)
        compare(folder, shard, options)


def compare(folder: Path, shard: int, options: Any) -> None:
    paths = sorted(folder.glob("*.safetensors"))
    size = sum(path.stat().st_size for path in paths)
    interpreters = {"bytes": sys.executable, "meshwright": sys.executable}
    interpreters |= {"transformers": options.peer} if options.peer else {}
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in interpreters}
    for turn in range(options.repeat):
        for kind, python in interpreters.items():
            for path in paths if options.cold else ():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            arguments = [kind, str(folder), options.dtype or ""]
            command = [python, __file__, "--child", *arguments]
            found[kind].append(run_child(command, keep_pythonpath=kind != "transformers"))
            print(turn, kind, found[kind][-1], file=sys.stderr)
    print(", ".join(f"{name} {version}" for name, version in versions("jax", "safetensors").items()))
    print(
        f"machine: {machine()}; folder of {size / 1e9:.2f} GB in {len(paths)} files, from the "
        f"{'disk' if options.cold else 'page cache'}; {options.repeat} turns\n"
    )
    rows = []
    ratios = {kind: [a["seconds"] / b["seconds"] for a, b in zip(runs, found["bytes"], strict=True)]
              for kind, runs in found.items()}  # fmt: skip
    for kind, runs in found.items():
        seconds, peaks = [run["seconds"] for run in runs], [run["bytes"] / 1e9 for run in runs]
        span = f"{median(seconds):.2f} ({min(seconds):.2f}-{max(seconds):.2f})"
        spent = median([run["cpu"] for run in runs])
        rows.append((kind, span, f"{median(ratios[kind]):.2f}x", f"{spent:.2f}", f"{median(peaks):.2f}"))
    headings = ("reader", "seconds: median (range)", "of the bytes' time", "CPU seconds", "peak memory in GB")
    print(table(headings, rows) + "\n")
    scale = 2 if options.dtype == "float32" else 1
    most = 1.3 * size * scale + max(path.stat().st_size for path in paths)
    used = max(run["bytes"] for run in found["meshwright"])
    text = f"peak {used / 1e9:.2f} GB (target: {most / 1e9:.2f} GB, 1.3x the devices' share plus a file)"
    print(verdict(text, used <= most))
    ratio = median(ratios["meshwright"])
    print(verdict(f"{ratio:.2f}x the time of reading the bytes (target: 1.3x)", ratio <= 1.3))


def write_folder(folder: Path, sizes: dict[str, int], shard: int) -> None:
    """Writes a folder of constant weights, one tensor at a time."""
    import jax.numpy as jnp
    import numpy as np

    from meshwright.checkpoint.convert.families import config_of_decoder, family_of
    from meshwright.checkpoint.convert.tensor_names import tensor_shapes
    from meshwright.checkpoint.convert.tensor_writer import Piece, TensorForm, write_tensors
    from meshwright.models import Decoder

    model = Decoder(vocab_size=32000, **sizes)
    dtype = jnp.dtype(jnp.bfloat16)
    forms = {name: TensorForm(shape, dtype) for name, shape in tensor_shapes(model, family_of(model)).items()}
    pieces = (Piece(name, 0, np.full(form.shape, 0.01, dtype)) for name, form in forms.items())
    write_tensors(folder, pieces, forms, max_shard_bytes=shard)
    (folder / "config.json").write_text(json.dumps(config_of_decoder(model, dtype="bfloat16")))


def measured(read: Any) -> dict[str, float]:
    before, start, spent = peak_resident(), time.perf_counter(), time.process_time()
    kept = read()
    seconds, spent = time.perf_counter() - start, time.process_time() - spent
    del kept
    return {"seconds": seconds, "cpu": spent, "bytes": peak_resident() - before}


def with_meshwright(folder: Path, dtype: str | None) -> dict[str, float]:
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    import jax

    from meshwright.checkpoint.convert.pretrained import read_pretrained

    jax.block_until_ready(jax.device_put(0.0))
    return measured(lambda: jax.block_until_ready(read_pretrained(folder, mesh="fsdp:8", dtype=dtype).params))


def with_bytes(folder: Path, dtype: str | None) -> dict[str, float]:
    return measured(lambda: [path.read_bytes() for path in sorted(folder.glob("*.safetensors"))])


def with_transformers(folder: Path, dtype: str | None) -> dict[str, float]:
    import torch
    import transformers

    # Reading is lazy, so the weights are touched.
    def read() -> Any:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype or "bfloat16"))
        return model, [float(weight.detach().float().sum()) for weight in model.parameters()]

    return measured(read)


CHILDREN = {"bytes": with_bytes, "meshwright": with_meshwright, "transformers": with_transformers}

if __name__ == "__main__":
    main()
