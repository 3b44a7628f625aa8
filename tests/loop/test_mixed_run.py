"""A run on a mixture: options, tokens and losses by source in log and report, and weights that change on resume."""

import json

import numpy as np
import pytest

from meshwright.data import ChatRows, check_ledger
from meshwright.errors import ConfigError, DataError, StoreError
from meshwright.loop.run import train
from meshwright.loop.settings.config import TrainConfig, read_config
from meshwright.loop.settings.mixture_options import parse_sources
from meshwright.loop.settings.options import DataOptions
from meshwright.loop.sources import make_source


@pytest.fixture
def texts(tmp_path):
    """Three sources of different sizes."""
    for number, (name, size) in enumerate({"web": 40, "code": 24, "math": 8}.items()):
        lines = [{"text": f"{name} {n} " * (20 + 7 * number)} for n in range(size)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return [f"{name}={tmp_path / name}.jsonl" for name in ("web", "code", "math")]


# --- Options ---


def test_spellings_of_a_mixture(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("data: {web: /d/web, code: /d/code}\nmixture_weights: {web: 0.7, code: 0.3}\n")
    options = read_config(file).data
    assert options == DataOptions(data=("web=/d/web", "code=/d/code"), mixture_weights=("web=0.7", "code=0.3"))
    assert read_config(file) == TrainConfig().changed(TrainConfig(data=options).flat())
    file.write_text("data: [/d/web, /d/a:b/code]\n")
    assert parse_sources(read_config(file).data.data) == {"web": "/d/web", "code": "/d/a:b/code"}
    with pytest.raises(StoreError, match="the scheme s4:// is unknown"):
        TrainConfig().changed({"data": ("web=/d/web", "code=s4://bucket/code")})
    assert parse_sources("/d/a=b") is None
    (tmp_path / "a=b").write_text("text")
    assert parse_sources(str(tmp_path / "a=b")) is None
    assert parse_sources("a=b") == {"a": "b"}


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"data": ["a=x", "a=y"]}, "two sources of the mixture are called `a`"),
        ({"data": ["/d/a", "/e/a"]}, "two sources of the mixture are called `a`"),
        ({"data": ["a=x", "*.txt"]}, "needs a name"),
        ({"data": ["a=x", " "]}, "data is empty"),
        ({"data": []}, "data is an empty list"),
        ({"data": "x", "mixture_weights": ["x=1"]}, "mixture_weights has no effect"),
        ({"data": "x", "mixture_temperature": 2.0}, "mixture_temperature has no effect"),
        ({"data": ["a=x", "b=y"], "mixture_weights": ["a=-1", "b=1"]}, "weight of the source `a` is -1"),
        ({"data": ["a=x", "b=y"], "mixture_weights": ["a=nan", "b=1"]}, "weight of the source `a` is nan"),
        ({"data": ["a=x", "b=y"], "mixture_weights": ["a=0", "b=1"]}, "weight of the source `a` is 0"),
        ({"data": ["a=x", "b=y"], "mixture_weights": ["a=1", "a=1"]}, "two weights"),
        ({"data": ["a=x", "b=y"], "mixture_weights": ["1"]}, "names no source"),
        ({"data": ["a=x", "b=y"], "mixture_temperature": -1.0}, "mixture_temperature=-1.0 is out of range"),
        ({"data": ["a=x", "b=y"], "mixture_weights": ["a=1", "b=1"], "mixture_temperature": 1.0}, "exclude each other"),
    ],
)
def test_wrong_options(options, match):
    with pytest.raises(ConfigError, match=match):
        TrainConfig().changed(options)


def test_wrong_sources(texts, tmp_path, make_config):
    def open_source(**changes):
        return make_source(make_config(**{"data": texts, "num_tokens": 16, **changes}), None, tell=lambda line: None)

    with pytest.raises(DataError, match="a weight names `wbe`, which is not a source"):
        open_source(mixture_weights=["wbe=1", "code=1", "math=1"])
    with pytest.raises(DataError, match="the source `math` has no weight"):
        open_source(mixture_weights=["web=1", "code=1"])
    with pytest.raises(DataError, match="the source `none`: no file matches"):
        open_source(data=[*texts, f"none={tmp_path}/none.txt"])
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(DataError, match="the source `empty`: the data is empty"):
        open_source(data=[*texts, f"empty={tmp_path}/empty.txt"])
    source = open_source(mixture_temperature=1e9)
    assert max(source.weights.values()) - min(source.weights.values()) < 100


# --- Runs ---


def lines_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_changes_its_weights_on_resume(texts, tmp_path, make_config):
    folder = tmp_path / "run"
    shared = {
        "data": texts,
        "num_tokens": 16,
        "batch_size": 8,
        "ledger": True,
        "run": str(folder),
        "eval_every": 4,
        "report": True,
    }
    shared |= {"checkpoint_every": 4, "eval_batches": 1, "data_cache": str(tmp_path / "cache"), "validation": 0.2}
    said = []
    first = make_config(**shared, steps=4, mixture_weights=["web=0.5", "code=0.25", "math=0.25"])
    train(first, say=said.append)
    assert any("code, weight 0.25: 24 documents" in line for line in said)
    second = make_config(**shared, steps=8, resume=True, mixture_weights=["web=0.125", "code=0.125", "math=0.75"])
    train(second, say=said.append)
    assert any("mixture_weights from" in line for line in said)

    steps = {line["step"]: line for line in lines_of(folder) if "loss" in line}
    for step, line in steps.items():
        tokens = {name: line[f"tokens/{name}"] for name in ("web", "code", "math")}
        assert sum(tokens.values()) == line["tokens"]
        by_source = sum(count * line[f"loss/{name}"] for name, count in tokens.items())
        assert by_source / line["tokens"] == pytest.approx(line["loss"], rel=1e-5)
        rows = (4, 2, 2) if step <= 4 else (1, 1, 6)
        assert all(abs(count / 16 - wanted) < 1 for count, wanted in zip(tokens.values(), rows, strict=True))
    losses = [line for line in lines_of(folder) if "eval/loss" in line]
    assert [line["step"] for line in losses] == [4, 8]
    for line in losses:
        parts = [line[f"eval/loss/{name}"] for name in ("web", "code", "math")]
        assert min(parts) <= line["eval/loss"] <= max(parts)
        assert len(set(parts)) == 3
    report = check_ledger(folder / "ledger").require()
    assert {name: sum(counts) for name, counts in report.sources.items()} == {"web": 20, "code": 12, "math": 32}
    page = (folder / "report.html").read_text()
    assert "Held-out loss by source" in page
    assert "Training loss by source" in page
    assert "held-out loss" in page


def test_packed_tokens_are_a_source_like_text(texts, tmp_path, make_config):
    np.tile(np.arange(256, dtype="<u2")[::-1], 20).tofile(tmp_path / "packed.bin")
    sidecar = tmp_path / "packed.bin.json"
    sidecar.write_text('{"dtype": "uint16", "vocab_size": 256}')
    config = make_config(data=[*texts, f"packed={tmp_path}/packed.bin"], num_tokens=16)
    source = make_source(config, None, tell=lambda line: None)
    assert len(source.sources["packed"]) == 19 * 16
    sidecar.write_text('{"dtype": "uint16", "vocab_size": 50257}')
    with pytest.raises(DataError, match=r"the source `packed`: .*packed.bin has a vocabulary of 50257 tokens"):
        make_source(config, None, tell=lambda line: None)
    with pytest.raises(DataError, match="holds packed tokens and other files"):
        make_source(make_config(data=str(tmp_path / "*.*")), None, tell=lambda line: None)


def test_conversations_are_a_source_like_text(texts, tmp_path, make_config):
    template = tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    turns = [[{"role": "user", "content": "Hi " * n}, {"role": "assistant", "content": "Ho " * n}] for n in range(1, 9)]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps({"messages": each}) + "\n" for each in turns))
    options = {"data": [*texts, f"chat={tmp_path}/chat.jsonl"], "num_tokens": 32, "validation": 0.3}
    said = []
    with pytest.raises(DataError, match="the source `chat`: conversations need a chat template"):
        make_source(make_config(**options), None, tell=said.append)
    source = make_source(make_config(**options, chat_template=str(template)), None, tell=said.append)
    assert isinstance(source.sources["chat"], ChatRows)
    assert any("8 conversations" in line and "longer than a row and cut" in line for line in said)
    alone = make_config(data=f"{tmp_path}/chat.jsonl", chat_template=str(template), num_tokens=32, batch_size=2)
    assert isinstance(make_source(alone, None, tell=said.append).rows, ChatRows)


def test_a_streamed_run_resumes_exactly(texts, tmp_path, make_config):
    path = texts[0].partition("=")[2]
    shared = {"data": path, "num_tokens": 16, "batch_size": 8, "tokenize": "stream", "validation": 0.2, "eval_every": 3}
    shared |= {"checkpoint_every": 3, "eval_batches": 1, "data_cache": str(tmp_path / "cache"), "ledger": True}
    train(make_config(**shared, schedule="constant", steps=6, run=str(tmp_path / "whole")), say=lambda line: None)
    for steps in (3, 6):
        changes = {"steps": steps, "run": str(tmp_path / "parts"), "resume": steps > 3}
        train(make_config(**shared, schedule="constant", **changes), say=lambda line: None)
    whole, parts = (
        [line["loss"] for line in lines_of(tmp_path / name) if "loss" in line] for name in ("whole", "parts")
    )
    assert whole == parts
    assert not (tmp_path / "cache").exists()
    check_ledger(tmp_path / "parts" / "ledger").require()


def test_wrong_streams(texts, tmp_path, make_config):
    def open_source(**changes):
        return make_source(make_config(tokenize="stream", **changes), None, tell=lambda line: None)

    path = texts[0].partition("=")[2]
    with pytest.raises(DataError, match="a mixture needs the token cache"):
        open_source(data=texts)
    with pytest.raises(DataError, match=r"the data has \d+ rows of 4096 tokens; a batch needs"):
        open_source(data=path, num_tokens=4096)
    (tmp_path / "chat.jsonl").write_text('{"messages": []}\n')
    with pytest.raises(DataError, match="--tokenize stream reads text, not conversations"):
        open_source(data=str(tmp_path / "chat.jsonl"))
    (tmp_path / "a.bin").write_bytes(b"ab")
    with pytest.raises(DataError, match="--tokenize stream reads text, not packed tokens"):
        open_source(data=str(tmp_path / "a.bin"))
