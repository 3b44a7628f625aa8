"""Whole runs that stop early, also after they were interrupted."""

import json

import pytest

from meshwright.errors import ConfigError

# A learning rate that makes the loss rise after a few steps.
RISING = "rising = make(optimizer=lambda steps: optax.sgd(lambda n: jnp.where(n < 4, 0.5, -2.0)), schedule=None)\n"
PLAIN = {"learning_rate": 3e-3, "weight_decay": 0.1, "warmup": 20, "steps": 40, "eval_every": 2, "patience": 2}


def evaluations(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["eval/loss"] for line in lines if "eval/loss" in line}


@pytest.mark.slow
def test_a_run_stops_early_and_a_resumed_one_at_the_same_step(desk):
    desk.add(RISING)
    said = []
    whole = desk.run("rising", name="whole", checkpoint_every=5, keep_last=1, say=said.append, **PLAIN)
    found = evaluations(desk.folder("whole"))
    best = min(found, key=found.get)
    assert (whole.why, whole.step, whole.best) == ("stopped early", best + 4, (best, found[best]))
    assert any(line.startswith(f"stopped early at step {best + 4}: no improvement in 2") for line in said)
    assert any(f"best loss {found[best]:.4g} at step {best}" in line for line in said)
    kept = {path.name for path in (desk.folder("whole") / "checkpoints").iterdir()}
    assert kept == {str(best), str(best + 4)}
    # Stopped right before the evaluation that ends the run, and in between.
    for at, resume in ((best + 1, False), (best + 4, True)):
        assert desk.run("rising", stop=at, resume=resume, **PLAIN).why == "preempted"
    again = desk.run("rising", resume=True, **PLAIN)
    assert (again.why, again.step, again.best) == (whole.why, whole.step, whole.best)
    assert desk.bits(again.state) == desk.bits(whole.state)
    assert evaluations(desk.folder()) == found
    # Resuming it again changes nothing; more patience continues.
    assert desk.run("rising", resume=True, **PLAIN).step == whole.step
    assert desk.run("rising", resume=True, **PLAIN | {"patience": 4}).step == best + 8


def test_patience_needs_evaluation_data(desk):
    desk.add("blind = make(eval_data=None)\n")
    with pytest.raises(ConfigError, match="--patience needs evaluation data: the job has no eval_data"):
        desk.run("blind", patience=2)
    with pytest.raises(ConfigError, match=r"'acc' is not a metric of the evaluation.\nhint: (did you mean|use one of)"):
        desk.run("arrays", patience=2, monitor="acc:max", steps=2, eval_every=1)
