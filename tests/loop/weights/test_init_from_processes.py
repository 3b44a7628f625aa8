"""Two processes import a model folder, start a run from it and export it: each reads its share, as one would."""

import json
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

from meshwright.checkpoint.convert.pretrained import read_pretrained, write_pretrained
from meshwright.models import Decoder

MODEL = Decoder(vocab_size=256, num_layers=2, d_model=16, num_heads=4, num_kv_heads=2, head_dim=8, d_ff=32)
CHILD = """
import json, sys
from contextlib import ExitStack
import jax
rank, port, folder, config = int(sys.argv[1]), sys.argv[2], sys.argv[3], json.loads(sys.argv[4])
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)
jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank, coordinator_bind_address=f"127.0.0.1:{port}")
import numpy as np
import meshwright as mw
from meshwright.checkpoint.convert.pretrained import PretrainedFolder, read_pretrained, write_pretrained
from meshwright.checkpoint.convert.tensor_names import abstract_params
from meshwright.loop.settings.config import TrainConfig
from meshwright.loop.logging.progress import Voice
from meshwright.loop.setup import set_up

source = PretrainedFolder(folder + "/hf")
whole = mw.flatten_tree(read_pretrained(folder + "/hf").params, sep="/")
source.files.bytes_read = 0
layout = mw.make_layout(source.model.rules, abstract_params(source.model), mw.create_mesh("fsdp:4,tp:2"))
placed = {leaf.name: source.place(leaf.name, leaf, layout.mesh, leaf.dtype) for leaf in layout.leaves}
held = 0
for name, array in placed.items():
    shards = {str(shard.index): shard for shard in array.addressable_shards}
    for shard in shards.values():
        np.testing.assert_array_equal(shard.data, whole[name][shard.index])
    held += sum(shard.data.size for shard in shards.values()) * 2  # stored in bfloat16
out = {"read": source.files.bytes_read, "held": held}
params = jax.tree.unflatten(layout.structure, [placed[leaf.name] for leaf in layout.leaves])
out["paths"] = len(write_pretrained(folder + "/two", source.model, params, max_shard_bytes=9000))
try:
    write_pretrained(folder + "/two", source.model, params)
except mw.MeshwrightError as error:
    out["error"] = str(error)
said = []
with ExitStack() as stack:
    state = set_up(TrainConfig().changed(config), Voice(said.append), stack).state
    for name, array in mw.flatten_tree(state.params, sep="/").items():
        for shard in array.addressable_shards:
            np.testing.assert_array_equal(shard.data, whole[name][shard.index].astype(np.float32))
out["said"] = said
print(json.dumps(out), flush=True)
"""


@pytest.mark.slow
def test_two_processes_read_their_shares_start_a_run_and_export(make_config, tmp_path):
    rng, shapes = np.random.default_rng(0), jax.eval_shape(MODEL.init, jax.random.key(0))
    params = jax.tree.map(lambda leaf: 0.2 * rng.standard_normal(leaf.shape).astype(np.float32), shapes)
    write_pretrained(tmp_path / "hf", MODEL, params, dtype="bfloat16", max_shard_bytes=9000)
    plain = {"model": "auto", "model_options": [], "optimizer": "sgd", "learning_rate": 0.1, "schedule": "constant"}
    plain |= {"warmup": 0, "steps": 3, "eval_every": 0, "sample_tokens": 0, "report": False, "hang": 0}
    plain |= {"init_from": str(tmp_path / "hf"), "mesh": "dp:2,fsdp:2,tp:2"}
    config = make_config(**plain)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = [str(port), str(tmp_path), json.dumps(config.flat())]
    children = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", CHILD, str(rank), *shared], stdout=-1, stderr=-1, text=True
        )
        for rank in range(2)
    ]
    try:
        done = [child.communicate(timeout=240) for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()
    assert [child.returncode for child in children] == [0, 0], [err[-3000:] for _, err in done]
    outs = [json.loads(out.splitlines()[-1]) for out, _ in done]

    total = 2 * MODEL.num_params
    for rank, out in enumerate(outs):
        assert out["read"] == out["held"]
        assert any(line.startswith("starting from") for line in out["said"]) == (rank == 0)
        assert out["read"] < 0.55 * total  # both read the norms, which every device holds
        assert "is not empty" in out["error"]  # the first process fails, and the other one with it
        assert (out["paths"] > 3) == (rank == 0)
    host = read_pretrained(tmp_path / "hf").params
    write_pretrained(
        tmp_path / "one", MODEL, jax.tree.map(lambda leaf: leaf.astype(np.float32), host), max_shard_bytes=9000
    )
    assert {path.name: path.read_bytes() for path in (tmp_path / "two").iterdir()} == {
        path.name: path.read_bytes() for path in (tmp_path / "one").iterdir()
    }
