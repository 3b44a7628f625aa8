"""Rows of text say how many documents they have, and a run on GPUs gives attention their lengths if they are few."""

import json

import jax
import pytest

from meshwright.loop import decisions
from meshwright.loop.settings.config import TrainConfig
from meshwright.loop.sources import make_source
from meshwright.models import Decoder


@pytest.fixture
def texts(tmp_path):
    """Documents of 20 and of 6 tokens, with their ends."""
    for name, size in (("long", 19), ("short", 5)):
        lines = [{"text": str(number) * size} for number in (1, 2, 3, 4, 5, 6, 7, 8, 9) * 4]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return {name: str(tmp_path / f"{name}.jsonl") for name in ("long", "short")}


@pytest.fixture
def config(texts, tmp_path):
    def made(*names, **options):
        data = texts[names[0]] if len(names) == 1 else [f"{name}={texts[name]}" for name in names]
        fixed = {"data_cache": str(tmp_path / "cache"), "batch_size": 2, "num_tokens": 24, "model": "decoder-tiny"}
        return TrainConfig().changed({"data": data, **fixed, **options})

    return made


@pytest.mark.parametrize("names", [("long",), ("short",), ("long", "short")])
def test_the_most_documents_of_a_row(config, names):
    source = make_source(config(*names), None, tell=print)
    parts = list(source.sources.values()) if len(names) > 1 else [source.rows, source.eval_rows]
    parts += source.eval_sources.values()
    rows = [part[place] for part in parts for place in range(len(part))]
    assert source.most_segments == max(len(set(row["segment_ids"].tolist())) for row in rows)


def test_the_most_documents_of_a_stream_are_not_known(config):
    assert make_source(config("long", tokenize="stream"), None, tell=print).most_segments is None


def test_a_run_on_gpus_takes_lengths_of_few_documents(config, monkeypatch):
    def job():
        return decisions._load(config("long"), None, print)[1]

    assert job().execution.max_segments is None
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert job().execution.max_segments == job().loss.execution.max_segments == 2
    local = Decoder.named("tiny", sliding_window=8)
    assert decisions.segments_to_pack(3, local, platform="gpu") is None
