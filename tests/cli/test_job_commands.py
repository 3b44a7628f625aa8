"""Commands report invalid jobs and options as one error with a hint, without a traceback."""

import pytest

from meshwright.cli.doctor import doctor
from meshwright.cli.plan_command import plan
from meshwright.cli.plan_options import StepOptions
from meshwright.cli.rules import rules
from meshwright.cli.verify import verify
from meshwright.errors import JobError, MeshError, MeshwrightError

SOURCE = """
import jax
import jax.numpy as jnp
import meshwright as mw

BATCH = {"x": jax.ShapeDtypeStruct((16, 8), "float32")}

def init(key):
    return {"w": jnp.ones((8,))}

def fails(*args):
    return jnp.ones(2) @ jnp.ones(3)

def bad(key):
    return fails()

def make(**changes):
    given = {"init": init, "rules": [("w", mw.P("fsdp"))], "loss": fails, "batch": BATCH, "mesh": "fsdp:8"}
    return mw.Job(**(given | changes))

job = make()
bad_init = make(init=bad)
"""


@pytest.fixture
def job(tmp_path):
    path = tmp_path / "commands_job.py"
    path.write_text(SOURCE)
    return f"{path}:job"


def test_functions_that_raise(job, tmp_path):
    where = r"\n.*commands_job\.py:12: TypeError: dot_general requires"
    with pytest.raises(JobError, match=rf"`loss` of the job '.*commands_job\.py:job' failed\.{where}"):
        verify(job)
    with pytest.raises(JobError, match=rf"`loss` of the job '.*commands_job\.py:job' failed\.{where}"):
        plan(job, mesh="fsdp:8", step=StepOptions(target="cpu:8", compile=False))
    bad = job.replace(":job", ":bad_init")
    for command in (rules, verify):
        with pytest.raises(JobError, match=rf"`init` of the job '.*:bad_init' failed\.{where}"):
            command(bad)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"minibatches": (0,)}, r"num_minibatches must be at least 1; got \(0,\)\.\nhint: pass 1"),
        ({"minibatches": (1, -2)}, r"num_minibatches .* got \(1, -2\)"),
        ({"minibatches": ()}, r"num_minibatches .* got \(\)"),
        ({"pipeline": "zb-v", "mesh": ("fsdp:8",)}, r"--pipeline, .* would have no effect: no mesh has a pp axis"),
        ({"pipeline": "zb-v", "mesh": ("pp:2,dp:4",), "view": "both"}, r"--pipeline, .* no effect in the global view"),
        ({"pipeline": "zb-v"}, r"sets its own execution options, so pipeline cannot be changed"),
        ({"seed": -1}, r"seed must be from 0 to 4294967295; got -1\."),
        ({"seed": 2**32}, "seed .* got 4294967296"),
        ({"devices": -3}, "cannot compare -3 devices with one"),
    ],
)
def test_options_of_verify(job, options, text):
    with pytest.raises(MeshwrightError, match=text):
        verify(job, **options)


def test_a_picture_that_cannot_be_written(job, tmp_path):
    with pytest.raises(JobError, match=r"--svg needs --picture\.\nhint: add --picture"):
        rules(job, svg=tmp_path / "x.svg")
    with pytest.raises(JobError, match=r"cannot write .*x\.svg: No such file or directory\."):
        rules(job, picture="w", svg=tmp_path / "nothing" / "x.svg")
    assert rules(job, picture="w", svg=tmp_path / "x.svg") == 0
    assert "<svg" in (tmp_path / "x.svg").read_text()


@pytest.mark.parametrize("number", [0, -1])
def test_doctor_needs_at_least_one_device(number):
    with pytest.raises(MeshError, match=f"cannot simulate {number} CPU devices"):
        doctor(num_cpu_devices=number)
