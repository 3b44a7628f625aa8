"""The top-level namespace, and the promise that every documented function has an example."""

import importlib
import inspect
import re
from pathlib import Path

import pytest

import meshwright as mw

REFERENCE = Path(__file__).parents[1] / "docs" / "reference"


def documented_functions():
    """Yields the dotted name of every function that the reference lists."""
    for page in sorted(REFERENCE.glob("*.md")):
        module = "meshwright"
        for kind, name in re.findall(r"\.\. (currentmodule|automodule|autofunction):: (\S+)", page.read_text()):
            if kind == "autofunction":
                yield name if name.startswith("meshwright.") else f"{module}.{name}"
            else:
                module = name


@pytest.mark.parametrize("name", sorted(set(documented_functions())))
def test_a_documented_function_has_an_example(name):
    module, _, function = name.rpartition(".")
    assert ">>>" in inspect.getdoc(getattr(importlib.import_module(module), function)), f"{name} has no example"


def test_the_reference_lists_functions():
    assert len(set(documented_functions())) > 100


@pytest.mark.parametrize("name", mw.__all__)
def test_every_exported_name_can_be_used(name):
    assert getattr(mw, name) is not None


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"module 'meshwright' has no attribute 'make_trian_step'"):
        _ = mw.make_trian_step


@pytest.mark.parametrize("first", ["import meshwright.train, meshwright.verify", "from meshwright.verify import Case"])
def test_verify_and_train_are_callable_whatever_was_imported_before(run_python, first):
    code = f"""
    {first}
    import meshwright as mw
    print(callable(mw.verify), callable(mw.train), mw.verify.Case.__name__, mw.train.Job is mw.Job)
    try:
        mw.train("smoke")
    except mw.ConfigError as error:
        print(error)
    """
    result = run_python(code)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[0] == "True True Case True"
    assert "TrainConfig" in result.stdout


def test_calling_verify_compares_a_job():
    import jax
    import jax.numpy as jnp

    job = mw.Job(
        init=lambda key: {"w": jax.random.normal(key, (8, 8))},
        rules=[("w", mw.P("fsdp"))],
        loss=lambda params, batch, rng: (((batch["x"] @ params["w"]) ** 2).mean(), {}),
        batch={"x": jax.ShapeDtypeStruct((8, 8), jnp.float32)},
    )
    report = mw.verify(job, meshes="fsdp:8", views="global", num_steps=1)
    assert [case.verdict for case in report.cases] == ["equal"]
