"""Costs that XLA adds in the global view are noted with the source line of the job."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

import meshwright as mw
from meshwright import P
from meshwright.verify import verify
from meshwright.verify.diagnose.compile_notes import captured_stderr, compile_notes

RULES = mw.Rules([("up", P(None, "tp")), ("down", P("tp"))], optional_axes=("tp",))


def constrain(x, spec):
    mesh = mw.current_mesh()
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec)) if mesh.size > 1 else x


def replicates(params, batch, rng):
    h = constrain(batch["x"] @ params["up"], P(None, "tp"))
    h = constrain(jnp.tanh(h), P(("dp", "tp"), None))  # XLA goes from one to the other by replicating
    return jnp.mean((h @ params["down"] - batch["y"]) ** 2), {}


def gathers(params, batch, rng):
    h = constrain(jnp.tanh(batch["x"] @ params["up"]), P("dp", None))  # gathers the hidden activations
    return jnp.mean((jnp.sort(h, axis=-1) @ params["down"] - batch["y"]) ** 2), {}


def plain(params, batch, rng):
    return jnp.mean((jnp.tanh(batch["x"] @ params["up"]) @ params["down"] - batch["y"]) ** 2), {}


def notes_of(loss, **options):
    generator = np.random.default_rng(0)
    x, y = (generator.standard_normal((16, size)).astype(np.float32) for size in (8, 4))
    job = mw.Job(
        init=lambda key: {"up": jax.random.normal(key, (8, 64)), "down": jax.random.normal(key, (64, 4))},
        rules=RULES,
        loss=loss,
        batch={"x": x, "y": y},
    )
    report = verify(job, meshes="dp:2,tp:4", views="global", num_steps=1, inspect=True)
    report.require()
    return report


@pytest.fixture
def no_cache():
    """XLA warns only if it compiles."""
    jax.config.update("jax_enable_compilation_cache", False)
    jax.experimental.compilation_cache.compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    jax.experimental.compilation_cache.compilation_cache.reset_cache()


def test_involuntary_rematerialization(no_cache, capfd):
    report = notes_of(replicates)
    (note, *_) = [note for note in report.cases[0].notes if "involuntary full rematerialization" in note]
    assert "test_compile_notes.py:" in note
    assert "note (dp:2,tp:4, global view): XLA replicates f32[" in str(report)
    assert "Involuntary" not in capfd.readouterr().err


def test_gathers_of_activations():
    (note, *_) = [note for note in notes_of(gathers).cases[0].notes if "all-gather" in note]
    assert note.startswith("XLA gathers ")
    assert "along `tp` at " in note
    assert "test_compile_notes.py:" in note


def test_a_plain_job_has_no_notes():
    assert notes_of(plain).cases[0].notes == ()


WARNING = (
    "W1118 spmd_partitioner.cc:656] [SPMD] Involuntary full rematerialization. The compiler cannot go from sharding "
    "{devices=[1,8]<=[8]} to {devices=[8,1]<=[8]} efficiently for HLO operation %copy = f32[8,1]{1,0} copy(%p), "
    'sharding={devices=[1,8]<=[8]}, metadata={op_name="a" source_file="/home/me/model.py" source_line=7}. As the last\n'
)


def test_other_text_is_passed_on(capfd):
    with captured_stderr() as said:
        os.write(2, f"before\n{WARNING}after\n".encode())
    assert capfd.readouterr().err == "before\nafter\n"
    text = jax.jit(jnp.sin).lower(1.0).compile().as_text()
    (note,) = compile_notes(said.text, text, {"dp": 8})
    assert note.startswith("XLA replicates f32[8,1] at model.py:7 to change its sharding from {devices=[1,8]<=[8]} to")
