"""A run's result: evaluation by source equals the run's own, text and answers come from its last good checkpoint."""

import json
import math
import re
import shutil
import sys

import jax
import numpy as np
import pytest

import meshwright as mw
from meshwright.cli import main
from meshwright.loop.results.lm_eval_adapter import RunAnswers, harness_model
from meshwright.loop.results.saved_run import open_run
from meshwright.loop.results.source_scores import SourceScore
from meshwright.loop.run import train

TEXTS = {"one.txt": "mesh axis ring shard tree " * 12, "two.jsonl": '{"text": "räder"}\n{"text": "tree mesh"}\n'}

RUN = {
    "model": "decoder-tiny",
    "model_options": ["num_layers=1", "d_model=16", "d_ff=16", "num_heads=2"],
    "batch_size": 8,
    "num_tokens": 16,
    "mesh": "dp:4,fsdp:2",
    "steps": 4,
    "sample_tokens": 6,
    "report": False,
    "tensorboard": False,
    "log_seconds": 1000.0,
    "hang": 0.0,
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")
    for name, text in TEXTS.items():
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def cli(capsys):
    def run(*args):
        with pytest.raises(SystemExit) as ended:
            main([str(arg) for arg in args])
        captured = capsys.readouterr()
        return ended.value.code or 0, captured.out, captured.err

    return run


@pytest.fixture(scope="module")
def trained(tmp_path_factory, text_folder, token_cache):
    folder = tmp_path_factory.mktemp("runs") / "run"
    places = {"data": str(text_folder), "data_cache": str(token_cache), "run": str(folder)}
    train(mw.TrainConfig().changed(RUN | places))
    return folder


def reference(run, text):
    """Returns the summed loss of a text and the number of targets, in rows of 16 tokens without a context before."""
    params, _, _ = run.restore(mw.create_mesh("dp:1", devices=1))
    ids, total = np.frombuffer(text.encode() + b"\0", np.uint8).astype(np.int32), 0.0
    for start in range(0, len(ids) - 1, 16):
        row = ids[start : start + 17]
        logs = jax.nn.log_softmax(run.model.apply(params, row[None, :-1])[0])
        total -= float(sum(logs[place, token] for place, token in enumerate(row[1:])))
    return total, len(ids) - 1


@pytest.mark.parametrize("mesh", [(), ("--mesh", "dp:2,fsdp:2,tp:2")])
def test_eval_gives_the_loss_of_each_file(cli, trained, data, mesh):
    code, out, _ = cli("eval", "--run", trained, "--data", data / "one.txt", data / "two.jsonl", "--json", *mesh)
    assert code == 0
    found = json.loads(out)
    assert found["step"] == 4
    one, two, both = found["sources"]
    assert [one["source"], two["source"], both["source"]] == [str(data / "one.txt"), str(data / "two.jsonl"), "all"]
    total, count = reference(open_run(trained), TEXTS["one.txt"])
    assert (one["num_targets"], one["num_bytes"]) == (count, len(TEXTS["one.txt"]))
    assert one["loss"] == pytest.approx(total / count, rel=1e-5)
    assert one["perplexity"] == pytest.approx(math.exp(total / count), rel=1e-4)
    assert one["bits_per_byte"] == pytest.approx(total / math.log(2) / len(TEXTS["one.txt"]), rel=1e-5)
    # Two documents: each byte but the first is a target, and the end; "ä" has two bytes.
    assert (two["num_targets"], two["num_bytes"]) == (6 + 9, 6 + 9)
    assert both["loss"] == pytest.approx((one["loss"] * count + two["loss"] * 15) / (count + 15), rel=1e-6)


def test_a_part_of_a_file_counts_its_share_of_the_bytes():
    score = SourceScore("a", num_targets=10, num_bytes=20, loss=math.log(2), accuracy=0.5)
    assert score.bits_per_byte == pytest.approx(0.5)
    assert SourceScore("a", 1, 1, 1e4, 0.0).perplexity == math.inf


def test_generate_prints_the_text(cli, trained):
    args = ("generate", "--run", trained, "--max-tokens", 6, "--temperature", 0, "--ignore-end")
    code, alone, err = cli(*args, "--prompt", "mesh")
    assert code == 0
    assert alone.startswith("mesh")
    assert "step 4 of" in err
    assert "texts may get" not in err
    code, out, _ = cli(*args, "--prompt", "mesh", "tree shard", "--json", "--mesh", "dp:2,fsdp:2,tp:2")
    found = json.loads(out)
    assert [item["prompt"] for item in found] == ["mesh", "tree shard"]
    assert found[0]["prompt"] + found[0]["text"] + "\n" == alone
    assert all(len(item["tokens"]) == 6 and item["why"] == "length" for item in found)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--max-tokens", 0), r"--max-tokens must be at least 1; got 0"),
        (("--max-tokens", 10**9), r"the cache of 1 rows of 1,000,000,\d+ tokens takes"),
        (("--step", 3), r"has no finished step 3(.|\n)*use one of: 4"),
        (("--temperature", -1), r"temperature=-1.0 is out of range"),
        (("--prompt", "a", "--prompt-file", "b"), r"both --prompt and --prompt-file"),
        (("--prompt-file", "/nowhere"), r"cannot read the prompts in /nowhere"),
        (("--stop", ""), r"a stop string is empty"),
    ],
)
def test_wrong_input_is_an_error(cli, trained, options, text):
    code, _, err = cli("generate", "--run", trained, *options)
    assert code == 1
    assert re.search(text, err), err


def test_runs_without_a_checkpoint_are_errors(cli, trained, tmp_path):
    code, _, err = cli("generate", "--run", tmp_path)
    assert (code, "holds no run" in err) == (1, True)
    (tmp_path / "config.yaml").write_text((trained / "config.yaml").read_text())
    code, _, err = cli("eval", "--run", tmp_path, "--data", tmp_path)
    assert (code, "has no finished checkpoint" in err) == (1, True)
    code, _, _ = cli("generate", "--run", trained, "--beam-width", 3)
    assert code == 2


def test_a_damaged_checkpoint_is_passed_over(cli, trained, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(trained, folder)
    shutil.copytree(folder / "checkpoints" / "4", folder / "checkpoints" / "9")
    (folder / "checkpoints" / "9" / "manifest.json").write_text("{")
    args = ("--prompt", "mesh", "--max-tokens", 2)
    code, _, err = cli("generate", "--run", folder, *args)
    assert code == 0, err
    assert "step 4 of" in err
    assert "skipped checkpoint 9" in err
    code, _, err = cli("generate", "--run", folder, "--step", 9, *args)
    assert code == 1


# --- lm-eval-harness ---


def test_answers_are_those_of_the_model(trained):
    run = open_run(trained)
    answers = RunAnswers(run, mw.create_mesh("dp:1", devices=1), length=24, batch_size=2)
    params, _, _ = run.restore(mw.create_mesh("dp:1", devices=1))
    text = b"mesh ring"
    logs = jax.nn.log_softmax(run.model.apply(params, np.frombuffer(text, np.uint8)[None].astype(np.int32))[0])
    wanted = sum(float(logs[place, text[place + 1]]) for place in range(4, 8))
    found = answers.loglikelihood([("mesh ", "ring"), ("", "mesh"), ("axis " * 9, "ring")])
    assert found[0][0] == pytest.approx(wanted, rel=1e-5)
    assert len(found) == 3
    (rolled,) = answers.loglikelihood_rolling(["mesh"])
    assert rolled == pytest.approx(found[1][0], rel=1e-5)
    (text,) = answers.generate_until([("mesh", {"until": ["\n\n"], "max_gen_toks": 5})] * 3)[:1]
    assert len(text.encode(errors="replace")) >= 1


def test_the_harness_is_optional(trained, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    with pytest.raises(mw.ConfigError, match="lm-eval-harness is not installed"):
        harness_model(trained)
