"""`--init-adapters`: a run that continues from the adapters of a PEFT folder; exports that look for the origin."""

import json
import shutil
from contextlib import ExitStack

import jax
import numpy as np
import pytest

from meshwright.checkpoint.convert.import_export import export_pretrained, pretrained_fact, save_params
from meshwright.checkpoint.convert.peft_adapters import write_peft
from meshwright.checkpoint.convert.pretrained import read_pretrained, write_pretrained
from meshwright.checkpoint.manifest import model_fact
from meshwright.errors import CheckpointError, ConfigError
from meshwright.loop.logging.progress import Voice
from meshwright.loop.setup import set_up
from meshwright.models import Decoder
from meshwright.train import language_job, lora
from meshwright.tree import flatten_tree

MODEL = Decoder(vocab_size=256, num_layers=2, d_model=16, num_heads=4, num_kv_heads=2, head_dim=8, d_ff=32)


def drawn(tree):
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: 0.2 * rng.standard_normal(leaf.shape).astype(np.float32), tree)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A base model, and adapters of it with rank 2."""
    place = tmp_path_factory.mktemp("peft")
    write_pretrained(place / "hf", MODEL, drawn(jax.eval_shape(MODEL.init, jax.random.key(0))))
    job = lora(language_job(MODEL, batch_size=2, num_tokens=8), rank=2, alpha=6, targets="attn/(q|v)$")
    params = drawn(jax.eval_shape(job.init, jax.random.key(0)))
    write_peft(place / "peft", params, job.lora)
    return place, {name: leaf for name, leaf in flatten_tree(params, sep="/").items() if "lora_" in name}


@pytest.fixture
def start(make_config, folders):
    plain = {"model": "auto", "model_options": [], "steps": 1, "eval_every": 0, "sample_tokens": 0, "report": False}
    plain |= {"init_from": str(folders[0] / "hf"), "init_adapters": str(folders[0] / "peft")}
    plain |= {"mesh": "dp:2,fsdp:2,tp:2"}

    def begin(**changes):
        said = []
        with ExitStack() as stack:
            ready = set_up(make_config(**plain | changes), Voice(said.append), stack)
            return {k: np.asarray(v) for k, v in flatten_tree(ready.state.params, sep="/").items()}, ready.setup, said

    return begin


@pytest.mark.parametrize("given", [None, "rank=2,alpha=6,targets=attn/(q|v)$,base=int8,block=4"])
def test_a_run_starts_from_the_adapters_of_a_peft_folder(start, folders, given):
    params, setup, said = start(lora=given)
    place, adapters = folders
    assert f"  adapters from {place / 'peft'}" in said
    assert (setup.job.lora.rank, setup.job.lora.alpha) == (2, 6)
    assert setup.config.adapt.lora.startswith("rank=2,alpha=6,targets=")  # for a resumed run
    assert sorted(name for name in params if "lora_" in name) == sorted(adapters)
    for name, value in adapters.items():
        np.testing.assert_array_equal(params[name], value)
    files = flatten_tree(read_pretrained(place / "hf").params, sep="/")
    np.testing.assert_array_equal(params["layers/attn_norm"], files["layers/attn_norm"])
    if given is None:
        np.testing.assert_array_equal(params["layers/attn/q/base"], files["layers/attn/q"])
    else:
        assert params["layers/attn/q/base"].dtype == np.int8


def test_wrong_adapters_are_errors(start, folders, tmp_path):
    peft = str(folders[0] / "peft")
    for changes, kind, text in (
        ({"lora": "rank=4"}, ConfigError, r"has rank=2,alpha=6; --lora has rank=4,alpha=32"),
        ({"init_from": peft, "init_adapters": None}, ConfigError, r"only adapters.\nhint: pass their base model"),
        ({"init_adapters": str(tmp_path / "none")}, CheckpointError, "cannot read .*adapter_config.json"),
        ({"init_from": None}, ConfigError, "have no effect without --init-from"),
        ({"lora": "rank=2,alpha=6,targets=attn/q$"}, CheckpointError, "tensors that the job does not have"),
    ):
        with pytest.raises(kind, match=text):
            start(**changes)


def test_an_export_finds_the_origin_where_it_is(folders, tmp_path):
    source = shutil.copytree(folders[0] / "hf", tmp_path / "old")
    (source / "tokenizer.json").write_text("{}")
    config = json.loads((source / "config.json").read_text())
    facts = {"model": model_fact(MODEL), "pretrained": pretrained_fact(source, config)}
    save_params(tmp_path / "run/checkpoints", read_pretrained(source).params, step=1, facts=facts)

    def export(name, **options):
        told = []
        paths = export_pretrained(tmp_path / "run/checkpoints", tmp_path / name, tell=told.append, **options)
        return told, (tmp_path / name / "tokenizer.json") in paths

    assert export("a") == ([], True)
    source.rename(tmp_path / "new")
    told, copied = export("b")
    assert "is gone or holds another model" in told[0]
    assert not copied
    assert export("c", like=tmp_path / "new") == ([], True)
    with pytest.raises(CheckpointError, match=r"--like .*old has no config.json(.|\n)*hint: pass the folder"):
        export("d", like=source)
    shutil.copytree(tmp_path / "new", tmp_path / "run/init")  # as `train --init-from` copies it
    assert export("e") == ([], True)
    source.mkdir()
    (source / "config.json").write_text(json.dumps(config | {"hidden_size": 8}))  # another model, at the old place
    assert export("f") == ([], True)
