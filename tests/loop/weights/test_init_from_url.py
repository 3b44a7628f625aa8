"""`--init-from` and `--tokenizer` at URLs: model folders are read by byte ranges, steps are fetched and verified."""

import json

import jax
import numpy as np
import pytest
import tokenizers

from meshwright.checkpoint.convert.pretrained import read_pretrained, write_pretrained
from meshwright.errors import CheckpointError, ConfigError
from meshwright.loop.run import train
from meshwright.loop.settings.init_options import InitOptions
from meshwright.loop.weights.initial_weights import open_weights
from meshwright.models import Decoder
from meshwright.remote import open_store
from meshwright.remote.object_store import ObjectStore
from meshwright.tree import flatten_tree

MODEL = Decoder(vocab_size=250, num_layers=2, d_model=16, num_heads=4, num_kv_heads=2, head_dim=8, d_ff=32)
PLAIN = {"model": "auto", "model_options": [], "optimizer": "sgd", "learning_rate": 0.0, "schedule": "constant"}
PLAIN |= {"warmup": 0, "weight_decay": 0.0, "steps": 1, "eval_every": 0, "sample_tokens": 0, "report": False}


@pytest.fixture
def store(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found = open_store(f"memory://bucket/{tmp_path.name}")
    yield found
    found.remove(found.list())


def upload(store, folder, name):
    for path in folder.rglob("*"):
        if path.is_file() and not path.name.startswith("."):
            store.put(f"{name}/{path.relative_to(folder).as_posix()}", path.read_bytes())


def flat(tree):
    return {name: np.asarray(leaf) for name, leaf in flatten_tree(tree, sep="/").items()}


@pytest.fixture
def model(store, tmp_path):
    """A sharded model folder in the store, with a tokenizer; returns its parameters."""
    params = MODEL.init(jax.random.key(3))
    write_pretrained(tmp_path / "model", MODEL, params, dtype="bfloat16", max_shard_bytes=9000)
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "<eos>": 2}, unk_token="a"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "model" / "tokenizer.json"))
    upload(store, tmp_path / "model", "model")
    return flat(read_pretrained(tmp_path / "model", dtype="float32").params)


def test_a_run_starts_from_urls_and_resumes_without_them(store, model, make_config, tmp_path, monkeypatch):
    def start(name, source, **changes):
        said = []
        options = PLAIN | {"init_from": f"{store}/{source}", "run": str(tmp_path / name)} | changes
        return flat(train(make_config(**options), say=said.append).state.params), said

    found, said = start("first", "model", mesh="dp:2,fsdp:2,tp:2")
    assert any(line.endswith("init/tokenizer.json") or "tokenizer: " in line for line in said)
    assert all(np.array_equal(value, model[name]) for name, value in found.items())
    fact = json.loads((tmp_path / "first" / "init" / "model.json").read_text())["pretrained"]
    assert fact["folder"] == f"{store}/model"
    kept = store.read("model/tokenizer.json")
    store.remove(list(store.list("model")))
    found, said = start("first", "model", resume=True, mesh="fsdp:8", steps=2)
    assert any(line.startswith("resumed from step 1 on fsdp:8") for line in said)
    # A run and a step in the store, with a tokenizer from it.
    upload(store, tmp_path / "first", "runs/first")
    store.put("model/tokenizer.json", kept)
    found, said = start("second", "runs/first", mesh="tp:2,dp:4", tokenizer=f"{store}/model/tokenizer.json")
    assert all(np.array_equal(value, model[name]) for name, value in found.items())
    found, said = start("third", "runs/first/checkpoints/2", mesh="fsdp:8", init_part="all", steps=3)
    assert any("step 2, with its optimizer state" in line for line in said)
    name = max(store.list("runs/first/checkpoints/2"), key=store.list().get)
    store.put(name, store.read(name)[:-1] + b"?")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another-cache"))
    with pytest.raises(CheckpointError, match=f"{store}/runs/first: .*contents changed"):
        open_weights(InitOptions(init_from=f"{store}/runs/first/checkpoints/2"))
    with pytest.raises(ConfigError, match=r"holds neither config.json nor checkpoints.\nhint: pass the URL of"):
        open_weights(InitOptions(init_from=f"{store}/nothing"))


def test_weights_at_a_url_are_read_by_ranges(store, model, monkeypatch):
    asked = []
    read = ObjectStore.read_range

    def count(self, name, start, stop):
        asked.append(stop - start)
        return read(self, name, start, stop)

    monkeypatch.setattr(ObjectStore, "read_range", count)
    weights = open_weights(InitOptions(init_from=f"{store}/model"))
    headers = sum(asked)
    up = weights.source.leaf("layers/mlp/up", (slice(1, 2), slice(0, 16), slice(4, 12)), np.float32)
    np.testing.assert_array_equal(up, model["layers/mlp/up"][1:2, :, 4:12])
    assert sum(asked) - headers == 8 * 16 * 2  # rows of the tensor, in bfloat16, of one layer of two
    down = weights.source.leaf("layers/mlp/down", (slice(0, 1), slice(0, 8), slice(0, 16)), np.float32)
    np.testing.assert_array_equal(down, model["layers/mlp/down"][:1, :8])
    assert sum(asked) - headers == 8 * 16 * 2 + 16 * 32 * 2  # columns need whole rows
    name = next(name for name in store.list("model") if name.endswith(".safetensors"))
    whole = store.read(name)
    store.put(name, whole[:-2])
    with pytest.raises(CheckpointError, match="may be incomplete"):
        open_weights(InitOptions(init_from=f"{store}/model"))
    with pytest.raises(CheckpointError, match="changed while it was read"):
        weights.read({}, None)
    store.put(name, b"x")
    with pytest.raises(CheckpointError, match="is not a safetensors file"):
        open_weights(InitOptions(init_from=f"{store}/model"))
