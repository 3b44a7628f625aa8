"""Optimizers and schedules of a job, and those named as `module:attribute`."""

import json
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshwright as mw
from meshwright.errors import ConfigError, JobError
from meshwright.loop.settings.config import OptimizerOptions, TrainConfig
from meshwright.loop.settings.optimizers import choose_optimizer, muon_line
from meshwright.plan.step_setup import named_optimizer
from meshwright.train import muon
from meshwright.train.optimizer.muon import orthogonalized_names


def moved(choice, steps=3):
    """Returns a parameter after some steps of gradient 1."""
    params = {"w": jnp.zeros(())}
    state = choice.optimizer.init(params)
    for _ in range(steps):
        updates, state = choice.optimizer.update({"w": jnp.ones(())}, state, params)
        params = optax.apply_updates(params, updates)
    return float(params["w"])


def job(**fields):
    return SimpleNamespace(**fields)


def halves(step):
    return 0.5 / (1 + step)


@pytest.fixture
def module(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import optax\n"
        "plain = optax.sgd(0.25)\n"
        "def by_steps(num_steps):\n"
        "    return optax.sgd(1 / num_steps)\n"
        "def fails(num_steps):\n"
        "    raise KeyError('rate')\n"
        "def schedule(step):\n"
        "    return 0.125\n"
        "number = 3\n"
    )
    return f"{tmp_path}/mine.py"


SGD = {"optimizer": "sgd", "beta1": 0.0, "weight_decay": 0.0}


def test_the_optimizer_comes_from_the_options_then_the_job_then_the_defaults(module):
    own = job(optimizer=lambda num_steps: optax.sgd(2 / num_steps), schedule=halves)
    chosen = choose_optimizer(OptimizerOptions(), 4, own)
    assert moved(chosen) == -1.5
    np.testing.assert_allclose(chosen.rates(3), [0.5, 0.25, 0.5 / 3], rtol=1e-6)
    assert moved(choose_optimizer(OptimizerOptions(optimizer=f"{module}:plain"), 4, own)) == -0.75
    assert moved(choose_optimizer(OptimizerOptions(optimizer=f"{module}:by_steps"), 4, own)) == -0.75
    chosen = choose_optimizer(OptimizerOptions(**SGD), 4, own)  # built in, with the job's schedule
    np.testing.assert_allclose(moved(chosen), -(0.5 + 0.25 + 0.5 / 3), rtol=1e-6)
    assert chosen.text == "learning rate: the job's schedule"
    chosen = choose_optimizer(OptimizerOptions(**SGD, schedule=f"{module}:schedule"), 4, own)
    assert moved(chosen) == -0.375
    options = OptimizerOptions(**SGD, schedule="constant", learning_rate=1.0, warmup=0)
    assert moved(choose_optimizer(options, 4, own)) == -3.0
    assert choose_optimizer(OptimizerOptions(), 4, job(optimizer=optax.adam(1.0))).rates(3) is None


def test_a_schedule_in_plain_python_is_logged():
    def steps_down(step):
        return 0.5 if step < 2 else 0.25

    chosen = choose_optimizer(OptimizerOptions(), 4, job(optimizer=optax.sgd(1.0), schedule=steps_down))
    assert chosen.rates(3).tolist() == [0.5, 0.5, 0.25]


@pytest.mark.parametrize(
    ("options", "fields", "message"),
    [
        ({"learning_rate": 1.0}, {"optimizer": optax.sgd(1.0)}, r"learning_rate is 1.0, .* the job's optimizer"),
        ({"beta2": 0.5}, {"optimizer": optax.sgd(1.0)}, "beta2 is 0.5, which would have no effect"),
        ({"schedule": "linear"}, {"optimizer": optax.sgd(1.0)}, "schedule is linear, which would have no effect"),
        ({"warmup": 5}, {"schedule": halves}, "warmup is 5, which would have no effect: the job's schedule sets"),
        ({"optimizer": "{module}:number"}, {}, "is a int, not an optax optimizer"),
        ({"optimizer": "{module}:fails"}, {}, "failed for 4 steps: KeyError: 'rate'"),
        ({"optimizer": "optax.contrib:muon"}, {}, "takes a learning rate, but would be called with the number of st"),
        ({}, {"optimizer": optax.adam}, r"the job's optimizer takes a learning rate.*4.\nhint: give a function such"),
        ({"optimizer": "{module}:palin"}, {}, r"no attribute 'palin'.\nhint: did you mean 'plain'"),
        ({"schedule": "{module}:number"}, {}, r"is a int.\nhint: give a function from the step"),
        ({}, {"schedule": lambda step: jnp.ones(3)}, r"returned .* for step 0"),
    ],
)  # fmt: skip
def test_options_without_effect_and_wrong_objects(module, options, fields, message):
    given = {name: value.format(module=module) if isinstance(value, str) else value for name, value in options.items()}
    with pytest.raises((ConfigError, JobError), match=message):
        choose_optimizer(OptimizerOptions(**given), 4, job(**fields))


def test_names_are_checked_before_anything_is_loaded():
    with pytest.raises(ConfigError, match=r"optimizer is 'adam'.\nhint: use one of adamw, .* or module:attribute"):
        TrainConfig().changed({"optimizer": "adam"})
    with pytest.raises(ConfigError, match=r"schedule is 'step'.\nhint: use one of cosine"):
        TrainConfig().changed({"schedule": "step"})


def test_a_run_with_the_optimizer_and_schedule_of_its_job(desk):
    desk.add("rate = lambda n: 0.1 / (1 + n)\nown = make(optimizer=lambda steps: optax.adam(rate), schedule=rate)\n")
    plain = {"learning_rate": 3e-3, "weight_decay": 0.1, "warmup": 20, "eval_every": 0, "steps": 4}
    said = []
    desk.run("own", stop=2, say=said.append, **plain)
    result = desk.run("own", resume=True, **plain)
    assert "optimizer: the job's; learning rate: the job's schedule, logged only" in said
    lines = [json.loads(line) for line in (desk.folder() / "metrics.jsonl").read_text().splitlines()]
    np.testing.assert_allclose([line["learning_rate"] for line in lines], [0.1, 0.05, 0.1 / 3, 0.025], rtol=1e-6)
    assert desk.bits(result.state) == desk.bits(desk.run("own", name="whole", **plain).state)


def test_a_job_says_what_muon_orthogonalizes():
    params = {"up": jnp.ones((8, 8)), "kernel": jnp.ones((3, 8, 8)), "head": jnp.ones((8, 8))}
    for fields, expected in (({}, ["up"]), ({"is_matrix": lambda name, leaf: leaf.ndim == 3}, ["kernel"])):
        chosen = choose_optimizer(OptimizerOptions(optimizer="muon"), 4, job(**fields))
        for optimizer in (chosen.optimizer, named_optimizer("muon", job(**fields))):
            assert orthogonalized_names(optimizer.init(params)) == expected


def test_a_run_names_the_parameters_that_take_adamw_steps():
    def init(key):
        return {"up": jnp.ones((8, 8)), "frozen": jnp.ones((8, 8))} | {f"bias_{n}": jnp.ones(8) for n in range(9)}

    adapted = mw.Job(init=init, rules=[(".*", mw.P())], frozen="frozen")
    mesh = mw.create_abstract_mesh("dp:8")
    line = muon_line(mw.state_layout(adapted, muon(1e-3), mesh), adapted)
    shown = ", ".join(f"bias_{n}" for n in range(8))
    assert line == f"muon: orthogonalizes 1 of 10 parameters (64 of 136 values); {shown} and 1 more take AdamW steps"
    assert muon_line(mw.state_layout(adapted, optax.adam(1e-3), mesh), adapted) is None
