"""All families of model folders against logits that transformers computed for the same weights, stored in families/.

`benchmarks/pretrained_transformers.py --store` writes the stored files.
"""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy

import meshwright as mw
from meshwright.checkpoint.convert.families import (
    FAMILIES,
    config_of_decoder,
    decoder_of_config,
    family_named,
    family_of,
)
from meshwright.checkpoint.convert.family import canonical
from meshwright.checkpoint.convert.fingerprint import difference_from, model_logits
from meshwright.checkpoint.convert.pretrained import read_pretrained, write_pretrained
from meshwright.checkpoint.convert.tensor_names import tensor_shapes
from meshwright.errors import CheckpointError
from meshwright.train import init_state, language_job, make_train_step, state_layout

from .seeded import seeded_weights

CASES = {path.stem: json.loads(path.read_text()) for path in sorted(Path(__file__).parent.glob("families/*.json"))}


def write_folder(folder, case, dtype=np.float32):
    """Writes the model folder of a stored case; its weights are drawn again."""
    config = CASES[case]["config"]
    model, family = decoder_of_config(config), family_named(config["model_type"])
    weights = seeded_weights(tensor_shapes(model, family), norm_offset=model.norm_offset)
    folder.mkdir()
    safetensors.numpy.save_file(
        {name: value.astype(dtype) for name, value in weights.items()}, folder / "model.safetensors"
    )
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_all_families_have_a_case():
    assert {case["config"]["model_type"] for case in CASES.values()} == set(FAMILIES)


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers_before_and_after_an_export(case, tmp_path):
    stored = CASES[case]["logits"]
    source = write_folder(tmp_path / "hf", case)
    found = read_pretrained(source)
    ours = model_logits(found.model, found.params, np.asarray(stored["tokens"], np.int32))
    assert difference_from(stored, ours) < 1e-5
    write_pretrained(tmp_path / "again", found.model, found.params, like=source, max_shard_bytes=20_000)
    again = read_pretrained(tmp_path / "again")
    assert again.config["model_type"] == found.config["model_type"]
    assert again.config["eos_token_id"] == 2
    assert canonical(again.model) == canonical(found.model)
    jax.tree.map(np.testing.assert_array_equal, again.params, found.params)


@pytest.mark.parametrize("case", CASES)
def test_a_decoder_finds_a_family_that_has_its_features(case):
    model = decoder_of_config(CASES[case]["config"])
    config = config_of_decoder(model)
    assert config["model_type"] == family_of(model).model_type
    assert canonical(decoder_of_config(config)) == canonical(model)


OLD = {
    # The forms of transformers 4, as most files on the hub have them.
    "llama_llama3": lambda rope: {"rope_theta": 10000.0, "rope_scaling": rope},
    "llama_linear": lambda rope: {"rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": rope["factor"]}},
    "gemma3": lambda rope: {
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        "layer_types": None,
        "sliding_window_pattern": 3,
    },
    "phi3": lambda rope: {
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "rope_scaling": {"type": "su", "short_factor": rope["short_factor"], "long_factor": rope["long_factor"]},
    },
    "qwen2_window": lambda rope: {"rope_theta": 10000.0, "layer_types": None},
}


@pytest.mark.parametrize("case", OLD)
def test_older_configurations_give_the_same_decoder(case):
    new = CASES[case]["config"]
    old = {name: value for name, value in new.items() if name != "rope_parameters"} | OLD[case](new["rope_parameters"])
    assert canonical(decoder_of_config(old)) == canonical(decoder_of_config(new))


def test_training_an_imported_model_equals_one_device(tmp_path):
    """Twenty SGD steps from a folder: sharded reading and a sharded step give the losses of one device."""
    source = write_folder(tmp_path / "hf", "gemma3")
    losses = {}
    for mesh in ("dp:1", "dp:2,fsdp:2,tp:2"):
        devices = mw.create_mesh(mesh, devices=1 if mesh == "dp:1" else 8)
        found = read_pretrained(source, mesh=devices)
        model = found.model
        job = language_job(model, batch_size=8, num_tokens=16)
        layout = state_layout(job, optax.sgd(0.1), devices)
        state = init_state(job, optax.sgd(0.1), layout, jax.random.key(0))
        state = dataclasses.replace(state, params=found.params)
        step = make_train_step(job, optax.sgd(0.1), layout)
        tokens = np.random.default_rng(0).integers(0, model.vocab_size, (8, 17)).astype(np.int32)
        batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
        losses[mesh] = []
        for _ in range(20):
            state, metrics = step(state, batch)
            losses[mesh].append(float(metrics["loss"]))
    one, many = losses.values()
    assert one[-1] < one[0] - 0.1
    np.testing.assert_allclose(many, one, rtol=2e-5)


@pytest.mark.parametrize(("case", "change", "text"), [
    ("llama", {"model_type": "gpt2"}, "no family with model_type 'gpt2'"),
    ("llama", {"model_type": None}, "no family with model_type None"),
    ("gemma3", {"model_type": "gemma3"}, "a model of text and images"),
    ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "architectures"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu'; only 'silu' is supported"),
    ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation='gelu'"),
    ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
    ("llama", {"attention_bias": True}, "attention_bias=True"),
    ("llama", {"rope_parameters": {"rope_type": "proportional", "factor": 2.0}}, "rope_type='proportional'"),
    ("llama", {"rope_parameters": {"rope_type": "linear"}}, "has no 'factor'"),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": float("nan")}}, "factor=nan"),
    ("llama", {"rope_parameters": {"mrope_section": [1, 2]}}, "mrope_section"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
    ("llama", {"residual_multiplier": 0.2}, "residual_multiplier=0.2, which may change the function"),
    ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps=nan"),
    ("llama", {"rms_norm_eps": -1e-5}, "rms_norm_eps=-1e-05"),
    ("llama", {"num_hidden_layers": 10**9}, "a whole number from 1 to 4096"),
    ("llama", {"num_hidden_layers": True}, "num_hidden_layers=True"),
    ("llama", {"hidden_size": "32"}, "hidden_size='32'"),
    ("llama", {"hidden_size": None}, "has no 'hidden_size'"),
    ("llama", {"num_key_value_heads": 3}, "describes no decoder"),
    ("qwen2_window", {"layer_types": ["chunked_attention"] * 4}, "layer_types"),
    ("qwen2_window", {"layer_types": ["full_attention"]}, "a list of 4 values"),
    ("smollm3", {"use_sliding_window": True}, "use_sliding_window=True"),
    ("phi3", {"rope_parameters": {"rope_type": "longrope", "short_factor": 2}}, "short_factor=2"),
])  # fmt: skip
def test_configurations_that_are_not_supported_are_errors(case, change, text):
    with pytest.raises(CheckpointError, match=text):
        decoder_of_config(CASES[case]["config"] | change)


def test_unknown_fields_can_be_ignored_and_dropout_is_told():
    config = CASES["llama"]["config"] | {"my_note": "x", "attention_dropout": 0.1}
    with pytest.raises(CheckpointError, match="my_note"):
        decoder_of_config(config)
    assert decoder_of_config(config, ignore=["my_note"]).num_layers == 4


def test_bfloat16_files_are_cast_and_told(tmp_path):
    source = write_folder(tmp_path / "hf", "phi3", jnp.bfloat16)
    plain = read_pretrained(source)
    assert plain.notes == []
    assert plain.params["layers"]["attn"]["k"].dtype == jnp.bfloat16
    cast = read_pretrained(source, mesh="fsdp:4,tp:2", dtype="float32")
    assert cast.notes == ["12 leaves cast from bfloat16 to float32"]
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a.astype(np.float32), b), plain.params, cast.params)
