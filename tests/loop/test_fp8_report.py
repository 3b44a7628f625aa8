"""A run in fp8 says how its matmuls run."""

import json

import pytest

from meshwright.errors import MeshwrightError
from meshwright.loop.run import train
from meshwright.loop.settings.config import TrainConfig
from meshwright.plan.compiled.fp8_matmuls import inspect_fp8

JOB = """
from meshwright.models import Decoder
from meshwright.train import language_job
job = language_job(Decoder(vocab_size=64, num_layers=1, d_model=256, num_heads=2, d_ff=256), batch_size=8, num_tokens=8)
narrow = language_job(Decoder.named("tiny"), batch_size=8, num_tokens=8)
"""


@pytest.fixture
def run(tmp_path):
    (tmp_path / "jobs.py").write_text(JOB)

    def start(job="job", *, inspect=inspect_fp8, **options):
        lines = []
        changes = {"job": f"{tmp_path}/jobs.py:{job}", "run": f"{tmp_path}/run", "steps": 1, "report": False}
        config = TrainConfig().changed(changes | {"precision": "fp8", "mesh": "dp:8"} | options)
        train(config, say=lines.append, inspect_fp8=inspect)
        events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
        return lines, [(event["kind"], event["text"]) for event in events]

    return start


@pytest.mark.slow  # compiles two steps of a decoder with features of a size that fp8 is for
def test_a_run_prints_and_logs_how_its_matmuls_run(run):
    text = "fp8 is emulated on this device: 21 projection matmuls of fp8 values run as 21 f32*f32->f32"
    lines, events = run()
    assert [line for line in lines if line.startswith(text)]
    assert [kind for kind, said in events if said.startswith(text)] == ["fp8"]

    # A fallback is a warning with the parameter's name; the run goes on from its checkpoint, with its scaling state.
    def falls_back(text, names, platform):
        assert platform == "cpu"
        return "fp8: 0 of 21", [f"`{names[0]}` does not run in fp8: ...\nhint: ..."]

    lines, events = run(inspect=falls_back, resume=True, steps=2)
    assert "warning: `layers/attn/k` does not run in fp8: ...\nhint: ..." in lines
    assert ("warning", "`layers/attn/k` does not run in fp8: ...\nhint: ...") in events


def test_narrow_models_are_refused(run):
    with pytest.raises(MeshwrightError, match=r"no parameter is multiplied in fp8: `layers/attn/k` has dims below 256"):
        run("narrow")
