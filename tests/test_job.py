import sys
import types

import jax
import pytest

import meshwright as mw
from meshwright import P

SOURCE = """
import jax.numpy as jnp
import meshwright as mw
from meshwright import P

def init(key):
    return {"w": jnp.ones((8, 8)), "n": jnp.zeros(())}

job = mw.Job(init=init, rules=[("w", P("fsdp"))], mesh="fsdp:8")
rules = [("w", P("fsdp"))]

def make():
    return job

class Plain:
    init = staticmethod(init)
    rules = [("w", P("fsdp"))]

class Empty:
    init = staticmethod(init)

empty = Empty()
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a module in it, as the current one; the import state is put back afterwards."""
    (tmp_path / "my_job.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith(("my_", "optax_")):
            del sys.modules[name]


@pytest.mark.parametrize("where", ["my_job", "my_job.py"])
@pytest.mark.parametrize("attribute", ["job", "make", "Plain"])
def test_load_job(folder, where, attribute):
    job = mw.load_job(f"{where}:{attribute}")
    assert mw.abstract_init(job.init)["w"].shape == (8, 8)
    assert list(mw.Rules(job.rules)) == [("w", P("fsdp"))]


@pytest.mark.parametrize(
    ("reference", "text"),
    [
        ("my_job", r"'my_job' does not name a job\.\nhint: write module:attribute"),
        ("my_job:", "does not name a job"),
        (":job", "does not name a job"),
        ("my_job:jobb", r"'my_job' has no attribute 'jobb'\.\nhint: did you mean 'job'"),
        ("my_job:zzzzzz", r"has no attribute 'zzzzzz'\.\nhint: it has: "),
        ("my_absent:job", r"no module 'my_absent' to import\.\nhint: run from the folder"),
        ("my_absent.py:job", "no file 'my_absent.py'"),
        ("my_job:empty", r"is a Empty without rules\.\nhint: a job needs init"),
        ("my_job:rules", "is a list without init and rules"),
    ],
)
def test_what_leads_to_no_job(folder, reference, text):
    with pytest.raises(mw.JobError, match=text):
        mw.load_job(reference)


@pytest.mark.parametrize(
    ("name", "imports"), [("my_broken", "no_such_dependency"), ("optax_job", "optax_j"), ("my_pkg.inner", "my")]
)
def test_a_missing_import_of_the_job_s_own_is_not_hidden(folder, name, imports):
    path = folder.joinpath(*name.split(".")).with_suffix(".py")
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"import {imports}")
    with pytest.raises(ModuleNotFoundError, match=f"No module named '{imports}'"):
        mw.load_job(f"{name}:job")


def test_abstract_init_allocates_nothing():
    def init(key):
        return {"w": jax.random.normal(key, (1 << 20, 1 << 20))}

    struct = mw.abstract_init(init)["w"]
    assert isinstance(struct, jax.ShapeDtypeStruct)
    assert struct.shape == (1 << 20, 1 << 20)


def test_any_object_with_these_attributes_is_a_job(folder, monkeypatch):
    module = types.ModuleType("my_made")
    module.job = types.SimpleNamespace(init=lambda key: {}, rules=[])
    monkeypatch.setitem(sys.modules, "my_made", module)
    assert mw.load_job("my_made:job") is module.job
