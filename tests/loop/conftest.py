"""A tiny run on generated text, which all tests of the loop start from."""

import json
import signal

import numpy as np
import pytest

from meshwright.loop.config import TrainConfig

OPTIONS = {
    "model": "decoder-tiny",
    "model_options": ["num_layers=1", "d_model=16", "d_ff=16", "num_heads=2", "dropout=0.1"],
    "batch_size": 8,
    "num_tokens": 16,
    "mesh": "dp:4,fsdp:2",
    "steps": 12,
    "warmup": 2,
    "checkpoint_every": 4,
    "eval_every": 6,
    "eval_batches": 1,
    "sample_tokens": 0,
    "report": False,
    "tensorboard": False,
    "log_seconds": 1000.0,
    "hang": 0.0,
}


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    rng = np.random.default_rng(0)
    for number in range(20):
        words = rng.choice(["mesh", "axis", "ring", "shard", "tree"], size=60)
        (folder / f"{number:02d}.txt").write_text(" ".join(words) + "\n")
    return folder


@pytest.fixture(scope="session")
def token_cache(tmp_path_factory):
    return tmp_path_factory.mktemp("tokens")


@pytest.fixture
def make_config(text_folder, token_cache, tmp_path):
    """A configuration of the tiny run, in a folder of its own unless `run` says otherwise."""

    def make(**changes):
        options = {"data": str(text_folder), "data_cache": str(token_cache), "run": str(tmp_path / "run")}
        return TrainConfig().changed(OPTIONS | options | changes)

    return make


@pytest.fixture
def read_run():
    """What a run wrote: its losses by step, and its events."""

    def read(folder):
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
        steps = [line for line in lines if "loss" in line]
        evaluations = {line["step"]: line["eval/loss"] for line in lines if "eval/loss" in line}
        return steps, evaluations, events

    return read


@pytest.fixture
def usual_signals():
    """Signals as in a terminal: tests that were started in the background, or under `nohup`, inherit ignored ones."""
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
