"""`fake_run`: a synthetic run folder for the tests of this folder."""

import json
import math
import random
import runpy
from pathlib import Path

import jax
import optax
import pytest

import meshwright as mw
from meshwright.loop.settings.config import TrainConfig
from meshwright.models import Decoder
from meshwright.train import language_job, state_layout

START = 1_790_000_000.0
SAMPLE_BEFORE = "def \x00\x07\ufffdq{\x1b[31m}|>K\u0003 \x7fe~\ufffd\ufffdZ<b>2</b>\t&amp;</script>\n\x0e!!vv"
SAMPLE_AFTER = (
    "get_parser(self, name, default=None):\n    if name is None:\n        return self._name\n    return default\n"
)


def decoder_layout(mesh="dp:2,fsdp:2,tp:2", sizes=None):
    sizes = sizes or {"vocab_size": 256, "num_layers": 4, "d_model": 256, "num_heads": 8, "d_ff": 1024}
    job = language_job(Decoder(**sizes), batch_size=16, num_tokens=256)
    return state_layout(job, optax.adamw(1e-3), mw.create_abstract_mesh(mesh))


def facts(name="decoder-small-001", mesh="dp:2,fsdp:2,tp:2", **changes):
    layout = decoder_layout(mesh)
    config = TrainConfig().changed(
        {"steps": 300, "mesh": mesh, "learning_rate": 1e-3, "model_options": ["num_layers=4"]}
    )
    return {
        "config": config.flat(),
        "mesh": dict(layout.mesh.shape),
        "mesh_reason": "16 rows and the state over 4 devices, features over 2; the state takes 9.6 MiB per device.",
        "layout": json.loads(layout.to_json()),
        "devices": ["cpu"] * layout.mesh.size,
        "device_kind": "cpu",
        "num_processes": 1,
        "versions": {"meshwright": "0.1.0", "jax": jax.__version__, "python": "3.11.7"},
        "num_params": 4_393_216,
        "flops_per_token": 2.9e7,
        "peak_flops": None,
        "tokens_per_step": 4096,
        "resume_command": f"meshwright train --run runs/{name} --resume",
        "started": START,
        "name": name,
    } | changes


def step_line(step, time, rng, *, total=300, mfu=False, first=False):
    """One line of metrics, with a falling loss."""
    loss = 1.9 + 3.65 * math.exp(-step / 45) + 0.05 * rng.gauss(0, 1)
    seconds = {"data": 0.004 + 0.002 * rng.random(), "step": 0.39 + 0.03 * rng.random() + (11.0 if first else 0.0)}
    seconds["checkpoint"] = 0.21 if step % 100 == 1 and step > 1 else 0.0
    seconds["eval"] = 0.9 if step % 50 == 1 and step > 1 else 0.0
    seconds["other"] = 0.003 + 0.001 * rng.random()
    took = sum(seconds.values())
    line = {
        "step": step,
        "time": time + took,
        "loss": loss,
        "grad_norm": 0.5 + 6 * math.exp(-step / 30) + 0.2 * rng.random(),
        "learning_rate": 1e-3 * min(1.0, step / 20) * (0.55 + 0.45 * math.cos(math.pi * step / total)),
        "tokens": 4096.0,
        "accuracy": 0.5 - 0.48 * math.exp(-step / 60),
        "tokens_per_second": 4096 / (took - seconds["eval"]),
        "memory_bytes": 1.9e9 + 1e6 * step,
        "seconds": seconds,
    }
    return line | ({"mfu": 0.38 + 0.02 * rng.random()} if mfu else {}), took


def write_lines(path, lines):
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")


@pytest.fixture
def fake_run(tmp_path):
    """Writes a run folder and returns it."""

    def make(
        name="decoder-small-001",
        *,
        steps=300,
        restarts=(),
        finished=True,
        evals=True,
        mfu=False,
        mesh="dp:2,fsdp:2,tp:2",
    ):
        folder = tmp_path / name
        folder.mkdir()
        rng, time = random.Random(0), START
        metrics, events = [], []

        def tell(kind, step, text, **more):
            events.append({"time": time, "step": step, "kind": kind, "text": text, **more})

        tell("start", 0, f"started on {mesh}")
        tell("sample", 0, SAMPLE_BEFORE, prompt="def ", when="before")
        first = True
        for step in range(1, steps + 1):
            if step - 1 in restarts:
                time += 90.0
                tell("resume", step - 1, f"resumed from step {step - 1} on {mesh}")
                first = True
            line, took = step_line(step, time, rng, total=steps, mfu=mfu, first=first)
            first = False
            time += took
            metrics.append(line)
            if evals and step % 50 == 0:
                loss = line["loss"] + 0.07
                metrics.append(
                    {"step": step, "time": time, "eval/loss": loss, "eval/accuracy": line["accuracy"] - 0.01}
                )
                tell("eval", step, f"step {step}: evaluation loss {loss:.4f}", loss=loss)
            if step % 100 == 0:
                tell("checkpoint", step, f"checkpoint of step {step} written")
        if finished:
            tell("sample", steps, SAMPLE_AFTER, prompt="def ", when="after")
            tell("finish", steps, f"finished at step {steps}")
        (folder / "run.json").write_text(json.dumps(facts(name, mesh)))
        (folder / "config.yaml").write_text(TrainConfig().to_yaml())
        write_lines(folder / "metrics.jsonl", metrics)
        write_lines(folder / "events.jsonl", events)
        return folder

    return make


@pytest.fixture
def browse(tmp_path):
    """Opens a page in Chromium; see tests/browser.py."""
    module = runpy.run_path(str(Path(__file__).parents[2] / "browser.py"))

    def look(path, **options):
        return module["browse"](path, tmp_path, **options)

    return look
