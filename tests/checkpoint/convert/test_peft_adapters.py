"""Adapters in the PEFT format, and merged exports.

The names and the logits were compared with peft 0.21.2 and transformers 5.23.0: 2.9e-6 apart for adapters that change
the logits by 3.7, and 3.6e-6 for the merged export.
"""

import dataclasses
import json

import jax
import numpy as np
import pytest

from meshwright.checkpoint.convert.import_export import export_adapters, export_pretrained, save_params
from meshwright.checkpoint.convert.peft_adapters import peft_settings, read_peft, write_peft
from meshwright.checkpoint.convert.pretrained import read_pretrained
from meshwright.checkpoint.manifest import model_fact
from meshwright.errors import CheckpointError
from meshwright.models import Decoder
from meshwright.train import language_job, lora

safetensors_numpy = pytest.importorskip("safetensors.numpy")

MODEL = Decoder(vocab_size=64, num_layers=2, d_model=32, num_heads=4, d_ff=64, num_kv_heads=2)
PLAIN = language_job(MODEL, batch_size=2, num_tokens=8)
TOKENS = np.random.default_rng(0).integers(0, 64, (2, 8)).astype(np.int32)


def trained(job):
    """Parameters whose adapters change the logits."""
    params = job.init(jax.random.key(0))
    leaves, structure = jax.tree.flatten(params)
    numbers = enumerate(leaves)
    moved = [leaf if leaf.any() else 0.1 * jax.random.normal(jax.random.key(i), leaf.shape) for i, leaf in numbers]
    return structure.unflatten(moved)


def saved(folder, job, params, *, step=3):
    facts = {"model": model_fact(MODEL), "lora": dataclasses.asdict(job.lora)}
    save_params(folder, params, step=step, facts=facts)
    return folder


@pytest.mark.parametrize("base", [None, "int8"])
def test_a_merged_export_equals_base_plus_adapters(tmp_path, base):
    job = lora(PLAIN, rank=4, alpha=12, targets="attn/(q|o)$|mlp/|head", base=base, block=8)
    params = trained(job)
    export_pretrained(saved(tmp_path / "steps", job, params), tmp_path / "merged")
    files = read_pretrained(tmp_path / "merged")
    wide = jax.tree.map(lambda leaf: leaf.astype(np.float32) if leaf.dtype == jax.numpy.bfloat16 else leaf, params)
    wanted = MODEL.apply(wide, TOKENS, lora=job.lora.adapters)
    np.testing.assert_allclose(files.model.apply(files.params, TOKENS), wanted, rtol=0, atol=1e-5)
    unchanged = MODEL.apply(PLAIN.init(jax.random.key(0)), TOKENS)
    assert np.abs(unchanged - wanted).max() > 0.1
    assert {leaf.dtype for leaf in jax.tree.leaves(files.params)} == {np.dtype(np.float32)}


def test_adapters_alone_have_the_names_of_peft_and_are_read_again(tmp_path):
    job = lora(PLAIN, rank=4, alpha=12, targets="attn/(q|k)$|head", dropout=0.0)
    params = trained(job)
    paths = export_adapters(saved(tmp_path / "steps", job, params), tmp_path / "peft", base_model="me/base")
    tensors = safetensors_numpy.load_file(paths[0])
    name = "base_model.model.model.layers.1.self_attn.k_proj"
    assert len(tensors) == 2 * (2 + 2 + 1)
    assert tensors[f"{name}.lora_A.weight"].shape == (4, 32)
    np.testing.assert_array_equal(tensors[f"{name}.lora_B.weight"], params["layers"]["attn"]["k"]["lora_b"][1].T)
    assert tensors["base_model.model.lm_head.lora_A.weight"].shape == (4, 32)
    config = json.loads(paths[1].read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (4, 12, "me/base")
    assert config["target_modules"] == ["k_proj", "lm_head", "q_proj"]
    settings = peft_settings(tmp_path / "peft")
    assert settings.scale == job.lora.scale
    again = lora(PLAIN, settings)
    read = read_peft(tmp_path / "peft", again.init(jax.random.key(0)))
    for got, want in zip(jax.tree.leaves(read), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(got, want)


def test_wrong_adapters_are_explained(tmp_path):
    job = lora(PLAIN, rank=4, targets="attn/q$")
    params = trained(job)
    embed = lora(PLAIN, rank=4, targets="embed")
    with pytest.raises(CheckpointError, match="`embed/table` is not a linear layer of Llama"):
        write_peft(tmp_path / "embed", embed.init(jax.random.key(0)), embed.lora)
    with pytest.raises(CheckpointError, match="have no adapters"):
        write_peft(tmp_path / "none", PLAIN.init(jax.random.key(0)), job.lora)
    save_params(tmp_path / "nameless", params, step=0, facts={"model": model_fact(MODEL)})
    with pytest.raises(CheckpointError, match="does not record the settings of its adapters"):
        export_pretrained(tmp_path / "nameless", tmp_path / "out")
    facts = {"model": model_fact(MODEL), "lora": dataclasses.asdict(job.lora)}
    for name, more, words in (
        ("fused", {"pretrained": {"config": {"model_type": "phi3"}}}, "phi3 stores several matrices in one tensor"),
        ("also", {"config": {"train": ["norm"]}}, "the run also trained norm, and these files hold adapters only"),
    ):
        save_params(tmp_path / name, params, step=0, facts=facts | more)
        with pytest.raises(CheckpointError, match=words):
            export_adapters(tmp_path / name, tmp_path / "out")
    write_peft(tmp_path / "peft", params, job.lora)
    with pytest.raises(CheckpointError, match=r"has shape \(4, 32\); the model needs \(2, 32\)"):
        read_peft(tmp_path / "peft", lora(PLAIN, rank=2, targets="attn/q$").init(jax.random.key(0)))
    with pytest.raises(CheckpointError, match=r"has no tensor base_model.model.model.layers.0.self_attn.v_proj"):
        read_peft(tmp_path / "peft", lora(PLAIN, rank=4, targets="attn/(q|v)$").init(jax.random.key(0)))
    with pytest.raises(CheckpointError, match="cannot read"):
        peft_settings(tmp_path / "steps")
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    for change, words in (
        ({"use_dora": True}, "use_dora=True; only False is supported"),
        ({"target_modules": ["q_prj"]}, r"adapts 'q_prj'(.|\n)*did you mean 'q_proj'"),
        ({"target_modules": "all-linear"}, "adapts 'all-linear'"),
    ):
        (tmp_path / "peft" / "adapter_config.json").write_text(json.dumps(config | change))
        with pytest.raises(CheckpointError, match=words):
            peft_settings(tmp_path / "peft")
