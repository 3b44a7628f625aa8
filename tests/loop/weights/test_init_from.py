"""`--init-from`: runs that start from a model folder or another run, on any mesh, and resume without it."""

import json
import shutil

import jax
import numpy as np
import pytest
import tokenizers

import meshwright as mw
from meshwright.checkpoint import Checkpoints, read_manifest
from meshwright.checkpoint.convert.import_export import export_pretrained
from meshwright.checkpoint.convert.pretrained import read_pretrained, write_pretrained
from meshwright.errors import CheckpointError, ConfigError
from meshwright.loop.results.saved_run import open_run
from meshwright.loop.run import train
from meshwright.models import Decoder
from meshwright.train import LoraSettings, merged
from meshwright.tree import flatten_tree

MODEL = Decoder(
    vocab_size=250, num_layers=2, d_model=16, num_heads=4, num_kv_heads=2, head_dim=8, d_ff=32, qk_norm=True,
    rope_scaling="llama3:factor=8,low_freq_factor=1,high_freq_factor=4,original=16",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Qwen 3 folder in bfloat16 whose vocabulary is smaller than that of bytes."""
    place = tmp_path_factory.mktemp("hf") / "model"
    rng, shapes = np.random.default_rng(0), jax.eval_shape(MODEL.init, jax.random.key(0))
    params = jax.tree.map(lambda leaf: 0.2 * rng.standard_normal(leaf.shape).astype(np.float32), shapes)
    write_pretrained(place, MODEL, params, dtype="bfloat16", max_shard_bytes=9000)
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps(config | {"eos_token_id": 7, "max_position_embeddings": 321}))
    return place


@pytest.fixture
def start(make_config, tmp_path):
    """Trains from a folder; with a learning rate of 0, the parameters stay as they were read."""
    plain = {"model": "auto", "model_options": [], "optimizer": "sgd", "learning_rate": 0.0, "schedule": "constant"}
    plain |= {"warmup": 0, "weight_decay": 0.0, "steps": 1, "eval_every": 0, "sample_tokens": 0, "report": False}

    def run(source, *, name="run", **changes):
        said = []
        options = plain | {"init_from": None if source is None else str(source), "run": str(tmp_path / name)} | changes
        return train(make_config(**options), say=said.append), said

    return run


def flat(tree):
    return {name: np.asarray(leaf) for name, leaf in flatten_tree(tree, sep="/").items()}


def test_a_model_folder_is_read_trained_resumed_without_it_and_exported(folder, start, tmp_path):
    source = shutil.copytree(folder, tmp_path / "source")
    files = flat(read_pretrained(source, dtype="float32").params)
    result, said = start(
        source, mesh="dp:2,fsdp:2,tp:2", ema=0.9, freeze=["embed"], learning_rate=0.1, checkpoint_every=1
    )
    assert any("padded to 256" in line for line in said)
    assert "  embed/table padded from [250, 16] to [256, 16] with zeros" in said
    assert any(line.startswith("  14 leaves cast from bfloat16 to float32") for line in said)
    params = flat(result.state.params)
    np.testing.assert_array_equal(params["embed/table"][:250], files["embed/table"])  # frozen
    assert not params["embed/table"][250:].any()
    moved = np.abs(params["layers/mlp/up"] - files["layers/mlp/up"]).max()
    assert 0 < moved < 0.05
    average = 0.9 * files["layers/mlp/up"] + 0.1 * params["layers/mlp/up"]
    np.testing.assert_allclose(flat(result.state.ema)["layers/mlp/up"], average, atol=1e-6)

    shutil.rmtree(source)  # a resumed run needs neither the folder nor the same mesh
    again, said = start(
        source, resume=True, mesh="fsdp:8", ema=0.9, freeze=["embed"], learning_rate=0.1, steps=2, checkpoint_every=1
    )
    assert any(line.startswith("resumed from step 1 on fsdp:8") for line in said)
    assert int(again.state.step) == 2
    facts = read_manifest(tmp_path / "run/checkpoints/2").facts
    assert facts["config"]["init_from"] == str(source)
    assert facts["pretrained"]["folder"] == str(source)

    told = []
    export_pretrained(tmp_path / "run/checkpoints", tmp_path / "out", tell=told.append)
    # Nothing about missing files: the run's copy of the configuration and the tokenizer serves.
    assert [text.split(",")[0] for text in told] == ["exporting the last parameters"]
    found = read_pretrained(tmp_path / "out")
    kept = [found.config[name] for name in ("model_type", "eos_token_id", "max_position_embeddings", "vocab_size")]
    assert kept == ["qwen3", 7, 321, 256]
    for name, value in flat(again.state.params).items():
        np.testing.assert_array_equal(flat(found.params)[name], value)


def test_a_run_is_a_start_on_another_mesh(folder, start, tmp_path):
    first, _ = start(folder, name="first", mesh="fsdp:8", learning_rate=0.1)
    wanted = flat(first.state.params)
    result, said = start(tmp_path / "first", name="second", mesh="dp:1,fsdp:4,tp:2")
    assert int(result.state.step) == 1
    assert [line for line in said if line.startswith("starting from")] == [
        f"starting from {tmp_path / 'first'}: 14 leaves"
    ]
    assert all(np.array_equal(value, wanted[name]) for name, value in flat(result.state.params).items())
    # The whole state, from the folder of a step: the step goes on.
    result, _ = start(tmp_path / "first/checkpoints/1", name="third", mesh="fsdp:8", init_part="all", steps=2)
    assert int(result.state.step) == 2
    assert all(np.array_equal(value, wanted[name]) for name, value in flat(result.state.params).items())
    with pytest.raises(ConfigError, match=r"at step 1, so --steps 1 leaves nothing to train.\nhint: raise --steps"):
        start(tmp_path / "first", name="fourth", init_part="all", mesh="fsdp:8")
    with pytest.raises(CheckpointError, match=r"no step 9 in .*\nhint: finished steps: 1"):
        start(tmp_path / "first", name="fourth", init_step=9)
    largest = max((tmp_path / "first/checkpoints/1/state").rglob("*"), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match="there is no good step"):
        start(tmp_path / "first", name="fourth")


@pytest.mark.parametrize("base", ["", ",base=nf4,block=4"])
def test_adapters_start_from_a_folder_and_are_merged_when_the_run_is_used(folder, start, tmp_path, base):
    files = flat(read_pretrained(folder, dtype="float32").params)
    lora = {"lora": f"rank=2,targets=attn|mlp/up{base}", "learning_rate": 0.1}
    result, said = start(folder, mesh="dp:2,fsdp:2,tp:2", **lora)
    assert not any("random" in line for line in said)
    params, settings = flat(result.state.params), LoraSettings.parse(lora["lora"])
    stored = dict(jax.device_get(result.state.params["layers"]["mlp"]["up"]))
    start_up = merged({"up": stored | {"lora_b": np.zeros_like(stored["lora_b"])}}, settings)["up"]
    # A weight in nf4 is off by at most half of the widest gap of its levels, 0.152 of the largest in its block.
    bound = 0.0 if not base else 0.153 * np.abs(files["layers/mlp/up"]).max()
    np.testing.assert_allclose(start_up, files["layers/mlp/up"], atol=bound, rtol=0)
    np.testing.assert_array_equal(params["layers/attn_norm"], files["layers/attn_norm"])  # not a matrix
    assert np.abs(params["layers/attn/q/lora_b"]).max() > 0

    # A finished run has plain matrices: the base plus its change.
    whole, step, _ = open_run(tmp_path / "run").restore(mw.create_mesh("tp:2", devices=2))
    assert step == 1
    for name, value in flat(merged(jax.device_get(result.state.params), settings)).items():
        np.testing.assert_allclose(flat(whole)[name], value, atol=1e-6)

    # Starting again from that run keeps its adapters.
    again, _ = start(tmp_path / "run", name="again", mesh="fsdp:4,tp:2", **(lora | {"learning_rate": 0.0}))
    for name, value in flat(again.state.params).items():
        np.testing.assert_array_equal(value, params[name])
    with pytest.raises(ConfigError, match=r"holds adapters with rank=2,alpha=32; --lora has rank=2,alpha=8"):
        start(tmp_path / "run", name="other", lora=f"rank=2,alpha=8,targets=attn|mlp/up{base}")
    with pytest.raises(ConfigError, match=r"holds adapters, but this run has none.\nhint: merge them with"):
        start(tmp_path / "run", name="other")


def test_differences_are_a_table_and_need_an_option(folder, start, tmp_path):
    options = {"model": "decoder-tiny", "mesh": "fsdp:8"}
    options["model_options"] = ["d_model=16", "num_heads=4", "num_kv_heads=2", "head_dim=8", "d_ff=40", "qkv_bias=true"]
    with pytest.raises(CheckpointError, match="other parameters than the model: 8 differences") as caught:
        start(folder, **options)
    rows = {tuple(line.split()[:2]) for line in str(caught.value).splitlines()[3:]}
    assert {("missing", "layers/attn/q_bias"), ("extra", "layers/attn/q_norm"), ("shape", "layers/mlp/up")} <= rows
    assert not (tmp_path / "run").exists()  # refused before anything is written
    accepted = {"init_missing": "random", "init_extra": "drop", "init_shape": "random"}
    result, said = start(folder, **options, **accepted)
    assert "  layers/attn/q_bias is not in --init-from and keeps random values" in said
    assert "  2 leaves of --init-from dropped, starting with layers/attn/k_norm" in said
    files, params = flat(read_pretrained(folder, dtype="float32").params), flat(result.state.params)
    np.testing.assert_array_equal(params["layers/attn/q"], files["layers/attn/q"])
    fresh = flat(start(None, name="fresh", **options)[0].state.params)
    np.testing.assert_array_equal(params["layers/mlp/up"], fresh["layers/mlp/up"])


def test_the_tokenizer_of_the_folder_is_used(folder, start, tmp_path):
    source = shutil.copytree(folder, tmp_path / "source")
    words = {word: place for place, word in enumerate(["<eos>", "[UNK]", "def", "return", "import", "self"])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(source / "tokenizer.json"))
    result, said = start(source, mesh="fsdp:8")
    assert f"tokenizer: {source / 'tokenizer.json'}" in said
    assert result.state.params["embed"]["table"].shape == (250, 16)  # no need to grow
    shutil.rmtree(source)
    _, said = start(source, mesh="fsdp:8", resume=True, steps=2)
    assert f"tokenizer: {tmp_path / 'run/init/tokenizer.json'}" in said
    # A run that starts from this one uses its tokenizer, also after its folder moved.
    (tmp_path / "run").rename(tmp_path / "moved")
    assert open_run(tmp_path / "moved").tokenizer.vocab_size == 6
    _, said = start(tmp_path / "moved", name="second", mesh="fsdp:8")
    assert f"tokenizer: {tmp_path / 'moved/init/tokenizer.json'}" in said
    (tmp_path / "moved").rename(tmp_path / "run")
    told = []
    export_pretrained(tmp_path / "run/checkpoints", tmp_path / "out", like=tmp_path / "run/init", tell=told.append)
    assert (tmp_path / "out/tokenizer.json").is_file()


def test_a_run_that_ended_before_its_first_checkpoint_reads_the_weights_again(folder, start, tmp_path):
    start(folder, mesh="fsdp:8")
    shutil.rmtree(tmp_path / "run/checkpoints")
    result, said = start(folder, mesh="fsdp:8", resume=True)
    assert f"starting from {folder}: 14 leaves" in said
    files = flat(read_pretrained(folder, dtype="float32").params)
    np.testing.assert_array_equal(flat(result.state.params)["layers/attn/q"], files["layers/attn/q"])
    assert Checkpoints(tmp_path / "run/checkpoints").steps() == [1]


@pytest.mark.parametrize(("changes", "text"), [
    ({"init_from": "/nothing/there"}, "is not a folder"),
    ({"init_from": "."}, "holds neither config.json nor checkpoints"),
    ({"init_from": "hf", "init_step": 3}, "need a run; --init-from is a Hugging Face folder"),
    ({"init_from": "hf", "init_part": "all"}, "need a run"),
    ({"init_from": "hf", "model_options": ["d_modle=3"]}, "the model of --init-from has no option"),
    ({"init_missing": "random"}, "have no effect without --init-from"),
    ({"init_from": " "}, "init_from is empty"),
])  # fmt: skip
def test_wrong_options_are_errors(changes, text, folder, start, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    if changes.get("init_from") == "hf":
        changes = changes | {"init_from": str(folder)}
    with pytest.raises(ConfigError, match=text):
        start(None, **changes)
    assert not (tmp_path / "run").exists()
