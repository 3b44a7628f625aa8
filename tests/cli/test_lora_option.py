"""`--lora` of `train` and `plan`."""

import json

import jax
import numpy as np
import pytest
import tyro

import meshwright as mw
from meshwright.checkpoint.arrays import read_anything
from meshwright.cli.plan_command import COMMANDS, join_words
from meshwright.errors import ConfigError
from meshwright.loop.settings.config import TrainConfig

LORA = "rank=2,alpha=4,base=int8,block=16"


def plan(capsys, *arguments):
    shared = ("--model", "decoder-tiny", "--num-tokens", "64", "--target", "h200:1x8", "--no-compile", "--json")
    words = join_words(["plan", "--mesh", "fsdp:2,tp:4", *shared, *arguments])
    tyro.extras.subcommand_cli_from_dict(COMMANDS, args=words)
    return json.loads(capsys.readouterr().out)


def test_a_plan_counts_the_state_of_adapters_and_repeats_the_option(capsys):
    whole, adapted = plan(capsys), plan(capsys, "--lora", LORA)
    sizes = [{part["name"]: part["bytes"] for part in one["memory"]["parts"]} for one in (whole, adapted)]
    assert sizes[1]["parameters"] < sizes[0]["parameters"] / 2
    assert sizes[1]["optimizer"] < sizes[0]["optimizer"] / 9
    for command in (adapted["command"], adapted["plan_command"]):
        assert f"--lora {LORA}" in command
    assert "--lora" not in whole["command"]
    with pytest.raises(ConfigError, match="no setting 'rnk'"):
        plan(capsys, "--lora", "rnk=2")


def test_settings_are_checked_before_a_run():
    with pytest.raises(ConfigError, match="alpha must be above 0"):
        TrainConfig().changed({"lora": "alpha=0"})


@pytest.mark.slow
def test_a_run_with_adapters_resumes_to_the_bit(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    options = {
        "model": "decoder-tiny", "data": str(text), "num_tokens": 32, "batch_size": 16, "mesh": "dp:4,fsdp:2",
        "lora": LORA, "ema": 0.9, "schedule": "constant", "warmup": 0, "checkpoint_every": 2, "sample_tokens": 4,
    }  # fmt: skip
    for run, steps in (("whole", [4]), ("parts", [2, 4])):
        for last in steps:
            more = {"run": str(tmp_path / run), "steps": last, "resume": last != steps[0]}
            mw.train(TrainConfig().changed(options | more))
    states = [read_anything(tmp_path / run / "checkpoints" / "4" / "state") for run in ("whole", "parts")]
    assert "lora_a" in states[0]["ema"]["layers"]["attn"]["q"]
    assert states[0]["params"]["layers"]["attn"]["q"]["base"].dtype == np.int8
    for whole, parts in zip(*map(jax.tree.leaves, states), strict=True):
        np.testing.assert_array_equal(np.asarray(whole), np.asarray(parts))
