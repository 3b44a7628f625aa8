"""Measures the memory and time of reading a sharded model folder onto 8 simulated devices.

usage: python benchmarks/import_weights.py [--layers N]

Writes a Llama folder in bfloat16 (2048 features, 8192 hidden, vocabulary 32000; 8 layers are about 1.1 GB) in files of
200 MB, then reads it in processes of their own: `read_pretrained` onto fsdp:8, plain reads of all bytes, and
`from_pretrained` of transformers if it is installed. Memory is the peak beyond the imports of the process.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measure import machine, peak_resident, run_child, table, verdict, versions

SHARD = 200_000_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--child", nargs=2)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(CHILDREN[options.child[0]](Path(options.child[1]))))
        return
    kinds = [name for name in CHILDREN if name != "transformers" or importlib.util.find_spec("transformers")]
    with tempfile.TemporaryDirectory() as folder:
        write_folder(Path(folder), options.layers)
        size = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))
        found = {kind: run_child([sys.executable, __file__, "--child", kind, folder]) for kind in kinds}
    print(", ".join(f"{name} {version}" for name, version in versions("jax", "safetensors", "transformers").items()))
    print(f"machine: {machine()}; folder of {size / 1e9:.2f} GB in files of up to {SHARD / 1e9:.1f} GB\n")
    rows = [(kind, f"{item['seconds']:.1f}", f"{item['bytes'] / 1e9:.2f}") for kind, item in found.items()]
    print(table(("reader", "seconds", "peak memory in GB"), rows) + "\n")
    most = 1.3 * size + SHARD
    used = found["meshwright"]["bytes"]
    print(
        verdict(
            f"peak {used / 1e9:.2f} GB (target: {most / 1e9:.2f} GB, 1.3x the devices' share plus a file)", used <= most
        )
    )
    ratio = found["meshwright"]["seconds"] / found["bytes"]["seconds"]
    print(verdict(f"{ratio:.2f}x the time of reading the bytes (target: 1.3x)", ratio <= 1.3))


def write_folder(folder: Path, layers: int) -> None:
    """Writes a folder of constant weights, one file at a time."""
    import numpy as np

    from meshwright.checkpoint.convert.families import config_of_decoder, family_of
    from meshwright.checkpoint.convert.tensor_files import write_tensors
    from meshwright.checkpoint.convert.tensor_names import tensor_shapes
    from meshwright.models import Decoder

    model = Decoder(vocab_size=32000, num_layers=layers, d_model=2048, num_heads=16, num_kv_heads=8, d_ff=8192)
    shapes = tensor_shapes(model, family_of(model))
    import jax.numpy as jnp

    tensors = ((name, np.full(shape, 0.01, jnp.bfloat16)) for name, shape in shapes.items())
    sizes = {name: 2 * int(np.prod(shape)) for name, shape in shapes.items()}
    write_tensors(folder, tensors, sizes, max_shard_bytes=SHARD)
    (folder / "config.json").write_text(json.dumps(config_of_decoder(model, dtype="bfloat16")))


def measured(read: Any) -> dict[str, float]:
    before, start = peak_resident(), time.perf_counter()
    kept = read()
    seconds = time.perf_counter() - start
    del kept
    return {"seconds": seconds, "bytes": peak_resident() - before}


def with_meshwright(folder: Path) -> dict[str, float]:
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    import jax

    from meshwright.checkpoint.convert.pretrained import read_pretrained

    jax.block_until_ready(jax.device_put(0.0))
    return measured(lambda: jax.block_until_ready(read_pretrained(folder, mesh="fsdp:8").params))


def with_bytes(folder: Path) -> dict[str, float]:
    return measured(lambda: [path.read_bytes() for path in sorted(folder.glob("*.safetensors"))])


def with_transformers(folder: Path) -> dict[str, float]:
    import torch
    import transformers

    # Reading is lazy, so the weights are touched.
    def read() -> Any:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        return model, [float(weight.detach().float().sum()) for weight in model.parameters()]

    return measured(read)


CHILDREN = {"bytes": with_bytes, "meshwright": with_meshwright, "transformers": with_transformers}

if __name__ == "__main__":
    main()
