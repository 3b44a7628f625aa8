"""Model folders: round trips, meshes, files from the hub, damaged and hostile folders."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import meshwright as mw
from meshwright.checkpoint.convert.families import config_of_decoder
from meshwright.checkpoint.convert.fingerprint import FINGERPRINT, check_pretrained
from meshwright.checkpoint.convert.import_export import decoder_of_text
from meshwright.checkpoint.convert.pretrained import PretrainedFolder, read_pretrained, write_pretrained
from meshwright.checkpoint.convert.tensor_writer import INDEX
from meshwright.errors import CheckpointError
from meshwright.models import Decoder

SIZES = {"vocab_size": 50, "num_layers": 2, "d_model": 32, "num_heads": 4, "d_ff": 48}
GROUPED = Decoder(**SIZES, num_kv_heads=2, head_dim=16, rope_theta=500.0, norm_eps=1e-5)
TIED = Decoder(**SIZES, tied_embeddings=True)


def noisy(model):
    """Returns parameters without ones and zeros, which could hide a mistake."""
    rng = np.random.default_rng(1)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    return jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape).astype(np.float32), shapes)


def tensors(folder):
    return {
        name: tensor
        for path in sorted(folder.glob("*.safetensors"))
        for name, tensor in safetensors.numpy.load_file(path).items()
    }


@pytest.mark.parametrize("model", [GROUPED, TIED], ids=["grouped", "tied"])
@pytest.mark.parametrize("most", [5 * 10**9, 20_000], ids=["one file", "several files"])
def test_round_trip(model, most, tmp_path):
    params = noisy(model)
    paths = write_pretrained(tmp_path / "hf", model, params, max_shard_bytes=most)
    if most == 20_000:
        index = json.loads((tmp_path / "hf" / INDEX).read_text())
        count = len(paths) - 2
        assert count > 2
        assert set(index["weight_map"].values()) == {
            f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)
        }
        assert index["metadata"]["total_size"] == sum(leaf.nbytes for leaf in jax.tree.leaves(params))
        for path in paths[:-2]:
            held = safetensors.numpy.load_file(path)
            assert [index["weight_map"][name] for name in held] == [path.name] * len(held)
            assert len(held) == 1 or sum(tensor.nbytes for tensor in held.values()) <= most
    else:
        assert [path.name for path in paths] == ["model.safetensors", "config.json"]
    back = read_pretrained(tmp_path / "hf")
    assert config_of_decoder(back.model) == config_of_decoder(model)
    jax.tree.map(np.testing.assert_array_equal, back.params, params)


def test_from_and_to_a_mesh_in_another_dtype(tmp_path, assert_placed):
    params = noisy(GROUPED)
    layout = mw.make_layout(GROUPED.rules, params, mw.create_mesh("fsdp:4,tp:2"))
    write_pretrained(tmp_path / "hf", GROUPED, layout.shard(params), dtype="bfloat16", max_shard_bytes=9000)
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert {str(tensor.dtype) for tensor in tensors(tmp_path / "hf").values()} == {"bfloat16"}
    rounded = jax.tree.map(lambda x: np.asarray(x).astype(jnp.bfloat16), params)
    jax.tree.map(np.testing.assert_array_equal, read_pretrained(tmp_path / "hf").params, rounded)
    placed = read_pretrained(tmp_path / "hf", dtype="float32", layout=layout).params
    up = rounded["layers"]["mlp"]["up"].astype(np.float32)
    assert_placed(placed["layers"]["mlp"]["up"], layout.mesh, layout["layers/mlp/up"].spec, up)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b.astype(np.float32)), placed, rounded)


def test_each_byte_is_read_once_and_replicas_share_it(tmp_path):
    write_pretrained(tmp_path, GROUPED, noisy(GROUPED))
    folder = PretrainedFolder(tmp_path)
    layout = mw.make_layout(GROUPED.rules, noisy(GROUPED), mw.create_mesh("dp:2,fsdp:4"))
    for leaf in layout.leaves:
        folder.place(leaf.name, leaf, layout.mesh, leaf.dtype)
    assert folder.files.bytes_read == 4 * GROUPED.num_params


def test_a_padded_layout_reads_zeros_beyond_the_vocabulary(tmp_path):
    params = noisy(GROUPED)
    write_pretrained(tmp_path, GROUPED, params)
    layout = mw.make_layout(GROUPED.rules, params, mw.create_mesh("fsdp:2,tp:4"), pad=True)
    placed = read_pretrained(tmp_path, layout=layout).params
    assert placed["embed"]["table"].shape == (52, 32)
    jax.tree.map(np.testing.assert_array_equal, layout.gather(placed), params)
    assert not np.asarray(placed["embed"]["table"])[50:].any()


def test_files_from_the_hub_may_have_more_tensors(tmp_path):
    """Old files store rotary frequencies, some tied models also their head; old configurations have fewer fields."""
    params = noisy(TIED)
    write_pretrained(tmp_path, TIED, params)
    weights = tensors(tmp_path)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    safetensors.numpy.save_file(weights, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    for name in ("head_dim", "rope_parameters", "num_key_value_heads", "attention_bias", "mlp_bias"):
        del config[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    back = read_pretrained(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, back.params, params)
    weights["lm_head.weight"] = weights["lm_head.weight"] + 1
    safetensors.numpy.save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lm_head.weight differs from the embedding"):
        read_pretrained(tmp_path)


def test_export_copies_tokenizer_files_and_fields_it_does_not_use(tmp_path):
    params = noisy(GROUPED)
    write_pretrained(tmp_path / "a", GROUPED, params)
    config = json.loads((tmp_path / "a/config.json").read_text())
    config |= {"eos_token_id": 7, "model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    config |= {"max_position_embeddings": 777, "sliding_window": None}
    (tmp_path / "a/config.json").write_text(json.dumps({k: v for k, v in config.items() if "_bias" not in k}))
    (tmp_path / "a/tokenizer.json").write_text("{}")
    paths = write_pretrained(tmp_path / "b", GROUPED, params, like=tmp_path / "a")
    assert [path.name for path in paths] == ["model.safetensors", "tokenizer.json", "config.json"]
    written = json.loads((tmp_path / "b/config.json").read_text())
    kept = ("eos_token_id", "model_type", "max_position_embeddings", "sliding_window")
    assert [written[name] for name in kept] == [7, "mistral", 777, None]


# --- Damaged and hostile folders ---


def test_files_that_do_not_match_are_rejected_with_a_table(tmp_path):
    write_pretrained(tmp_path, GROUPED, noisy(GROUPED))
    weights = tensors(tmp_path)
    del weights["model.norm.weight"]
    weights["model.layers.0.self_attn.q_proj.bias"] = np.ones(64, np.float32)
    weights["lm_head.weight"] = weights["lm_head.weight"][:40]
    safetensors.numpy.save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="do not match the model: 3 differences") as caught:
        read_pretrained(tmp_path)
    rows = [line.split()[:2] for line in str(caught.value).splitlines()[3:6]]
    assert rows == [
        ["missing", "model.norm.weight"],
        ["extra", "model.layers.0.self_attn.q_proj.bias"],
        ["shape", "lm_head.weight"],
    ]


@pytest.mark.parametrize("dtype", [np.int8, np.bool_, np.float64])
def test_weights_that_are_not_floats_of_training_are_rejected(dtype, tmp_path):
    write_pretrained(tmp_path, TIED, noisy(TIED))
    weights = tensors(tmp_path)
    weights["model.norm.weight"] = weights["model.norm.weight"].astype(dtype)
    safetensors.numpy.save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model.norm.weight in .* is (I8|BOOL|F64); only"):
        read_pretrained(tmp_path)


@pytest.mark.parametrize(("name", "content", "text"), [
    ("config.json", b"{", "cannot read"),
    ("config.json", b"[]", "not an object of fields"),
    ("config.json", b'"x"', "not an object of fields"),
    ("config.json", b"\xff\xfe", "cannot read"),
    ("config.json", b"[" * 100_000, "cannot read"),
    ("model.safetensors", b"", "cannot read"),
    ("model.safetensors", b"\xff" * 100, "cannot read"),
    (INDEX, b"{}", "has no weight_map"),
    (INDEX, b'{"weight_map": {"a": 3}}', "names 3, which is not a file"),
    (INDEX, b'{"weight_map": {"a": "../x"}}', "names '../x', which is not a file in its folder"),
])  # fmt: skip
def test_damaged_files_are_errors(name, content, text, tmp_path):
    write_pretrained(tmp_path, TIED, noisy(TIED))
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=text):
        PretrainedFolder(tmp_path)


def test_cut_files_and_empty_folders_are_errors(tmp_path):
    write_pretrained(tmp_path / "hf", TIED, noisy(TIED))
    path = tmp_path / "hf/model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="cannot read"):
        read_pretrained(tmp_path / "hf")
    path.unlink()
    with pytest.raises(CheckpointError, match="has neither"):
        read_pretrained(tmp_path / "hf")
    with pytest.raises(CheckpointError, match="cannot read"):
        read_pretrained(tmp_path / "nothing")


def test_decoders_without_an_equivalent_are_rejected(tmp_path):
    model = Decoder(**SIZES, qk_norm=True)
    with pytest.raises(CheckpointError, match="llama has no equivalent of qk_norm=True"):
        write_pretrained(tmp_path / "hf", model, noisy(model), family="llama")
    with pytest.raises(CheckpointError, match=r"no family has all features(.|\n)*llama has no equivalent of"):
        config_of_decoder(Decoder(**SIZES, attention_soft_cap=3.0))
    assert not (tmp_path / "hf").exists()
    (tmp_path / "x").write_text("mine")
    with pytest.raises(CheckpointError, match="is not empty"):
        write_pretrained(tmp_path, GROUPED, noisy(GROUPED))
    with pytest.raises(CheckpointError, match="cannot be cast to int8"):
        write_pretrained(tmp_path / "hf", GROUPED, noisy(GROUPED), dtype="int8")
    with pytest.raises(CheckpointError, match="the parameters do not match the model: 2 differences"):
        write_pretrained(tmp_path / "other", TIED, {**noisy(TIED), "head": {"a": np.ones(1), "b": np.ones(1)}})


@pytest.mark.parametrize("text", ["XLSTM(d_model=3)", "Decoder(1)", "Decoder(x=3)", "Decoder(d_ff=open('x'))", "1 +"])
def test_facts_without_a_decoder_are_errors(text):
    with pytest.raises(CheckpointError, match="is not a Decoder"):
        decoder_of_text(text)


# --- Fingerprints ---


@pytest.fixture
def _no_transformers(monkeypatch):
    monkeypatch.setattr("meshwright.checkpoint.convert.fingerprint.has_transformers", lambda: False)


@pytest.mark.usefixtures("_no_transformers")
def test_a_folder_without_a_fingerprint_cannot_be_checked(tmp_path):
    write_pretrained(tmp_path, TIED, noisy(TIED))
    with pytest.raises(CheckpointError, match=r"has no meshwright_logits\.json, and transformers is not installed"):
        check_pretrained(tmp_path)
    for damaged in ("{", "[]", "{}", '{"source": 1, "tokens": [], "positions": [], "ids": [], "logits": []}'):
        (tmp_path / FINGERPRINT).write_text(damaged)
        with pytest.raises(CheckpointError, match=r"cannot read|not an object|is damaged, or belongs"):
            check_pretrained(tmp_path)
