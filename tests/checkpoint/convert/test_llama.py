"""Conversion of decoders to Hugging Face Llama, compared with a forward pass written from its definition."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import meshwright as mw
from meshwright.checkpoint.convert.llama import (
    INDEX,
    decoder_of_config,
    decoder_of_text,
    llama_config,
    llama_shapes,
    read_llama,
    write_llama,
)
from meshwright.errors import CheckpointError
from meshwright.models import Decoder

SIZES = {"vocab_size": 50, "num_layers": 2, "d_model": 32, "num_heads": 4, "d_ff": 48}
GROUPED = Decoder(**SIZES, num_kv_heads=2, head_dim=16, rope_theta=500.0, norm_eps=1e-5)
TIED = Decoder(**SIZES, tied_embeddings=True)


def noisy(model):
    """Returns parameters without ones and zeros, which could hide a mistake."""
    params = model.init(jax.random.key(1))
    keys = iter(jax.random.split(jax.random.key(2), len(jax.tree.leaves(params))))
    return jax.tree.map(lambda x: x + 0.1 * jax.random.normal(next(keys), x.shape), params)


def llama(config, weights, tokens, *, rotate_pairs=False):
    """Returns the logits `[S, V]` of a Llama in float64: weights `[outputs, inputs]`, heads rotated by halves."""
    heads, groups, size = (config[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    w = {name: tensor.astype(np.float64) for name, tensor in weights.items()}

    def norm(x, name):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config["rms_norm_eps"]) * w[name]

    rates = config["rope_theta"] ** (-np.arange(0, size, 2) / size)
    angles = np.arange(len(tokens))[:, None] * rates
    angles = np.repeat(angles, 2, axis=-1) if rotate_pairs else np.concatenate([angles, angles], axis=-1)

    def rotate(x):  # [heads, tokens, size]
        if rotate_pairs:
            other = np.stack([-x[..., 1::2], x[..., ::2]], axis=-1).reshape(x.shape)
        else:
            other = np.concatenate([-x[..., size // 2 :], x[..., : size // 2]], axis=-1)
        return x * np.cos(angles) + other * np.sin(angles)

    h = w["model.embed_tokens.weight"][tokens]
    for layer in range(config["num_hidden_layers"]):
        place = f"model.layers.{layer}."
        x = norm(h, place + "input_layernorm.weight")
        q, k, v = (
            (x @ w[f"{place}self_attn.{name}_proj.weight"].T).reshape(len(tokens), count, size).swapaxes(0, 1)
            for name, count in (("q", heads), ("k", groups), ("v", groups))
        )
        k, v = (np.repeat(t, heads // groups, axis=0) for t in (rotate(k), v))
        scores = rotate(q) @ k.swapaxes(-1, -2) / np.sqrt(size)
        scores = np.where(np.tri(len(tokens), dtype=bool), scores, -np.inf)
        share = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = (share / share.sum(-1, keepdims=True)) @ v
        h = h + mixed.swapaxes(0, 1).reshape(len(tokens), -1) @ w[place + "self_attn.o_proj.weight"].T
        x = norm(h, place + "post_attention_layernorm.weight")
        gate, up = (x @ w[f"{place}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        h = h + (gate / (1 + np.exp(-gate)) * up) @ w[place + "mlp.down_proj.weight"].T
    return norm(h, "model.norm.weight") @ w.get("lm_head.weight", w["model.embed_tokens.weight"]).T


def tensors(folder):
    return {
        name: tensor
        for path in sorted(folder.glob("*.safetensors"))
        for name, tensor in safetensors.numpy.load_file(path).items()
    }


@pytest.mark.parametrize("model", [GROUPED, TIED], ids=["grouped", "tied"])
def test_exported_files_are_a_llama(model, tmp_path):
    params = noisy(model)
    write_llama(tmp_path / "hf", model, params)
    config, weights = json.loads((tmp_path / "hf" / "config.json").read_text()), tensors(tmp_path / "hf")
    assert {name: tensor.shape for name, tensor in weights.items()} == llama_shapes(model)
    assert ("lm_head.weight" in weights) == (not model.tied_embeddings)
    tokens = np.random.default_rng(0).integers(0, model.vocab_size, 12)
    ours = np.asarray(model.apply(params, jnp.asarray(tokens)[None]))[0]
    theirs = llama(config, weights, tokens)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-5 * np.abs(theirs).max())
    # The other way to rotate gives different logits, so the check above would detect it.
    assert np.abs(llama(config, weights, tokens, rotate_pairs=True) - theirs).max() > 0.05 * np.abs(theirs).max()


@pytest.mark.parametrize("model", [GROUPED, TIED], ids=["grouped", "tied"])
@pytest.mark.parametrize("most", [5 * 10**9, 20_000], ids=["one file", "several files"])
def test_round_trip(model, most, tmp_path):
    params = noisy(model)
    paths = write_llama(tmp_path / "hf", model, params, max_shard_bytes=most)
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
    back = read_llama(tmp_path / "hf")
    assert llama_config(back.model) == llama_config(model)
    assert jax.tree.structure(back.params) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, back.params, params)
    tokens = jnp.arange(8)[None]
    np.testing.assert_array_equal(back.model.apply(back.params, tokens), model.apply(params, tokens))


def test_from_and_to_a_mesh_in_another_dtype(tmp_path, assert_placed):
    params = noisy(GROUPED)
    layout = mw.make_layout(GROUPED.rules, params, mw.create_mesh("fsdp:4,tp:2"))
    write_llama(tmp_path / "hf", GROUPED, layout.shard(params), dtype="bfloat16")
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert {str(tensor.dtype) for tensor in tensors(tmp_path / "hf").values()} == {"bfloat16"}
    rounded = jax.tree.map(lambda x: np.asarray(x).astype(jnp.bfloat16), params)
    jax.tree.map(np.testing.assert_array_equal, read_llama(tmp_path / "hf").params, rounded)
    placed = read_llama(tmp_path / "hf", dtype="float32", layout=layout).params
    up = rounded["layers"]["mlp"]["up"].astype(np.float32)
    assert_placed(placed["layers"]["mlp"]["up"], layout.mesh, layout["layers/mlp/up"].spec, up)


def test_files_from_the_hub_may_have_more_tensors(tmp_path):
    """Old files store rotary frequencies, some tied models also their head; old configurations have fewer fields."""
    params = noisy(TIED)
    write_llama(tmp_path, TIED, params)
    weights = tensors(tmp_path)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    safetensors.numpy.save_file(weights, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    for name in ("head_dim", "rope_parameters", "num_key_value_heads", "attention_bias", "mlp_bias"):
        del config[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    back = read_llama(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, back.params, params)
    weights["lm_head.weight"] = weights["lm_head.weight"] + 1
    safetensors.numpy.save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lm_head.weight differs from the embedding"):
        read_llama(tmp_path)


def test_files_that_do_not_match_are_rejected_with_a_table(tmp_path):
    write_llama(tmp_path, GROUPED, noisy(GROUPED))
    weights = tensors(tmp_path)
    del weights["model.norm.weight"]
    weights["model.layers.0.self_attn.q_proj.bias"] = np.ones(64, np.float32)
    weights["lm_head.weight"] = weights["lm_head.weight"][:40]
    safetensors.numpy.save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="do not match the model: 3 differences") as caught:
        read_llama(tmp_path)
    rows = [line.split()[:2] for line in str(caught.value).splitlines()[3:]]
    assert rows == [
        ["missing", "model.norm.weight"],
        ["extra", "model.layers.0.self_attn.q_proj.bias"],
        ["shape", "lm_head.weight"],
    ]


@pytest.mark.parametrize(("change", "text"), [
    ({"model_type": "mistral"}, "model_type 'mistral'; only 'llama' is supported"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ({"attention_bias": True}, "attention_bias True"),
    ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5}}, "rope_type 'llama3'"),
    ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type 'linear'"),
])  # fmt: skip
def test_unsupported_llamas_are_rejected(change, text):
    with pytest.raises(CheckpointError, match=text):
        decoder_of_config(llama_config(GROUPED) | change)
    config = llama_config(GROUPED)
    del config["hidden_size"]
    with pytest.raises(CheckpointError, match=r"config.json has no 'hidden_size'"):
        decoder_of_config(config)


def test_decoders_without_a_llama_equivalent_are_rejected(tmp_path):
    model = Decoder(**SIZES, qk_norm=True)
    with pytest.raises(CheckpointError, match="Llama has no equivalent of qk_norm=True"):
        write_llama(tmp_path / "hf", model, model.init(jax.random.key(0)))
    with pytest.raises(CheckpointError, match=r"no equivalent of logit_soft_cap=30\.0"):
        llama_config(Decoder(**SIZES, logit_soft_cap=30.0))
    assert not (tmp_path / "hf").exists()
    (tmp_path / "x").write_text("mine")
    with pytest.raises(CheckpointError, match="is not empty"):
        write_llama(tmp_path, GROUPED, noisy(GROUPED))
    with pytest.raises(CheckpointError, match="cannot be cast to int8"):
        write_llama(tmp_path / "hf", GROUPED, noisy(GROUPED), dtype="int8")
    with pytest.raises(CheckpointError, match="the parameters do not match the model: 2 differences"):
        write_llama(tmp_path / "other", TIED, {**TIED.init(jax.random.key(0)), "head": {"a": 1, "b": 2}})


def test_an_index_cannot_name_files_elsewhere(tmp_path):
    write_llama(tmp_path / "hf", GROUPED, noisy(GROUPED), max_shard_bytes=20_000)
    index = json.loads((tmp_path / "hf" / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = "../secret.safetensors"
    (tmp_path / "hf" / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"names '../secret.safetensors', which is not a file in its folder"):
        read_llama(tmp_path / "hf")


@pytest.mark.parametrize("text", ["XLSTM(d_model=3)", "Decoder(1)", "Decoder(x=3)", "Decoder(d_ff=open('x'))", "1 +"])
def test_facts_without_a_decoder_are_errors(text):
    with pytest.raises(CheckpointError, match="is not a Decoder"):
        decoder_of_text(text)
