"""A run in fp8 says how its matmuls run."""

import json

import pytest

from meshwright.errors import MeshwrightError
from meshwright.loop.report.run_page import render
from meshwright.loop.report.run_record import read_run
from meshwright.loop.run import train
from meshwright.loop.settings.config import TrainConfig
from meshwright.plan.compiled.fp8_matmuls import ROLES, inspect_fp8

JOB = """
from dataclasses import replace
from meshwright.models import Decoder
from meshwright.train import language_job
model = Decoder(vocab_size=64, num_layers=2, d_model=64, num_heads=4, num_kv_heads=1, d_ff=64)
narrow = replace(language_job(model, batch_size=8, num_tokens=8), frozen="embed")
"""


@pytest.fixture
def run(tmp_path):
    (tmp_path / "jobs.py").write_text(JOB)

    def start(job, *, inspect=inspect_fp8, told=None, **options):
        lines = [] if told is None else told
        changes = {"job": f"{tmp_path}/jobs.py:{job}", "run": f"{tmp_path}/run", "steps": 1, "report": False}
        config = TrainConfig().changed(changes | {"precision": "fp8", "mesh": "dp:8"} | options)
        train(config, say=lines.append, inspect_fp8=inspect)
        events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
        return lines, [(event["kind"], event["text"]) for event in events]

    return start


def test_a_run_prints_and_logs_how_its_matmuls_run(run, tmp_path):
    chosen = {"fp8_matmuls": "attn/k|mlp/(up|down)$", "fp8_least_dim": 32}
    text = "fp8 is emulated on this device: 12 projection matmuls of fp8 values run as"
    lines, events = run("narrow", **chosen)
    (line,) = (line for line in lines if line.startswith(text))
    assert line.endswith("; too narrow for fp8: layers/attn/k (listed in " + f"{tmp_path}/run/events.jsonl)")
    assert [kind for kind, said in events if said.startswith(text)] == ["fp8"]
    # The event and the report list each parameter, pass and dtype.
    record = read_run(tmp_path / "run")
    matmuls = record.happened("fp8")[0]["matmuls"]
    own = {(row["name"], row["pass"]) for row in matmuls if row["pass"]}
    assert own == {(f"layers/mlp/{name}", one) for name in ("up", "down") for one in ROLES}
    # XLA:CPU widens all of them to float32 with jax 0.10, and some of them with 0.12.
    assert {row["dtypes"] for row in matmuls if row["pass"]} <= {"f32*f32->f32", "bf16*bf16->bf16"}
    page = render(record, now=0)
    assert "layers/mlp/up" in page
    assert "weight gradient" in page

    # A fallback is a warning with the parameter's name; the run goes on from its checkpoint, with its scaling state.
    def falls_back(text, names, emulates, frozen):
        assert emulates
        assert frozen == {"embed/table"}
        return "fp8: 0 of 12", [f"`{names[0]}` does not run in fp8: ...\nhint: ..."], []

    lines, events = run("narrow", inspect=falls_back, resume=True, steps=2, **chosen)
    assert "warning: `layers/mlp/down` does not run in fp8: ...\nhint: ..." in lines
    assert ("warning", "`layers/mlp/down` does not run in fp8: ...\nhint: ...") in events

    # A batch that stages cannot cut is refused before the run says that it trains.
    lines.clear()
    with pytest.raises(MeshwrightError, match="cannot split a batch of 8 rows into 1 minibatches of 4 microbatches"):
        run("narrow", mesh="dp:4,pp:2", told=lines, **{**chosen, "run": f"{tmp_path}/other"})
    assert not [line for line in lines if line.startswith("training from")]
    with pytest.raises(
        MeshwrightError, match=r"step 2 was saved with --precision fp8 and its delayed scaling, and this"
    ):
        run("narrow", resume=True, steps=3, precision="mixed")


def test_narrow_models_are_refused(run):
    hint = r"\nhint: use precision mixed, or choose others with --fp8-matmuls REGEX and --fp8-least-dim"
    with pytest.raises(MeshwrightError, match=rf"no parameter .* in fp8: `layers/attn/k` has dims below 256.*{hint}"):
        run("narrow")
