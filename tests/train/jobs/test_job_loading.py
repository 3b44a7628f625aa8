"""Loading jobs, and errors in their code."""

import functools
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import meshwright as mw
from meshwright import P
from meshwright.distributed.agreement import sources_of
from meshwright.train.jobs.job_loading import job_errors

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

def needs(first, *, second):
    return job

def fails():
    return {}["absent"]
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a module as the current directory; restores the import state afterwards."""
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
        ("my_job:zzzzzz", r"has no attribute 'zzzzzz'\.\nhint: use one of: "),
        ("my_absent:job", r"no module named 'my_absent'\.\nhint: run from the directory"),
        ("my_absent.py:job", "file 'my_absent.py' does not exist"),
        ("my_job:empty", r"is a Empty without rules\.\nhint: define init"),
        ("my_job:rules", "is a list without init and rules"),
        (
            "json:dumps",
            r"'json:dumps' is a function with required arguments: obj\.\nhint: name a meshwright.Job",
        ),
        ("my_job.py:needs", "required arguments: first, second"),
        ("my_job:fails", r"failed to make the job\.\nmy_job\.py:28: KeyError: 'absent'\nhint: return"),
        (
            "my_folder:job",
            r"'my_folder' is a folder, not a module\.\nhint: name a module in it: my_folder\.train:job\.",
        ),
        ("my_folder.empty:job", r"is a folder, not a module\.\nhint: name a Python file; this folder has none"),
    ],
)
def test_references_that_name_no_job(folder, reference, text):
    (folder / "my_folder" / "empty").mkdir(parents=True)
    (folder / "my_folder" / "train.py").touch()
    with pytest.raises(mw.JobError, match=text):
        mw.load_job(reference)


@pytest.mark.parametrize(
    ("name", "imports"), [("my_broken", "no_such_dependency"), ("optax_job", "optax_j"), ("my_pkg.inner", "my")]
)
def test_a_missing_import_in_the_job_is_reported(folder, name, imports):
    path = folder.joinpath(*name.split(".")).with_suffix(".py")
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"import {imports}")
    shown = str(path.relative_to(folder))
    with pytest.raises(mw.JobError, match=f"{shown}:1: ModuleNotFoundError: No module named '{imports}'") as caught:
        mw.load_job(f"{name}:job")
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


@pytest.mark.parametrize("where", ["my_bad", "my_bad.py"])
@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("a = 1\nb = c", r"my_bad\.py:2: NameError: name 'c' is not defined\nhint: run `python "),
        ("a = 1\n\ndef f(:", r"my_bad\.py:3: SyntaxError: "),
        ("import sys\nsys.exit(3)", r"my_bad\.py:2: SystemExit: 3\nhint: move the code that exits"),
        ("import my_other", r"my_other\.py:1: ZeroDivisionError: division by zero"),
        ("import meshwright\nmeshwright.Rules([('[', None)])", r"my_bad\.py:2: RuleError: rule 0: "),
    ],
)
def test_a_module_that_cannot_be_imported(folder, where, source, text):
    (folder / "my_bad.py").write_text(source)
    (folder / "my_other.py").write_text("1 / 0")
    sys.path.insert(0, str(folder))
    with pytest.raises(mw.JobError, match=rf"cannot import the job's module '{where}'\.\n{text}"):
        mw.load_job(f"{where}:job")
    assert "my_bad" not in sys.modules


TRACED = """
import functools
import jax.numpy as jnp

def helper(x):
    return x @ jnp.ones(3)

def init(size, key):
    return helper(jnp.ones(size))

class Model:
    init = staticmethod(functools.partial(init, 8))
    rules = []

    def loss(self, params, batch, rng):
        return helper(params), {}

job = Model()
"""


def test_errors_in_a_job_s_functions_have_file_and_line(folder):
    (folder / "my_traced.py").write_text(TRACED)
    job = mw.load_job("my_traced:job")
    text = r"`init` of the job 'my' failed\.\nmy_traced\.py:6: TypeError: .*shape(.|\n)*"
    lines = r"my_traced\.py:9, in init: return helper\(jnp.ones\(size\)\)\n +my_traced\.py:6, in helper"
    with pytest.raises(mw.JobError, match=text + lines) as caught, job_errors(job, "my"):
        mw.abstract_init(job.init)
    assert isinstance(caught.value.__cause__, TypeError)
    with pytest.raises(mw.JobError, match=r"`loss` of the job 'my' failed\.\nmy_traced\.py:6: "), job_errors(job, "my"):
        jax.eval_shape(job.loss, jax.ShapeDtypeStruct((8,), "float32"), None, None)
    with pytest.raises(mw.JobError, match=r"`loss` of the job 'my' failed\.(.|\n)*missing 2"), job_errors(job, "my"):
        job.loss(None)


def test_a_bound_partial_is_found():
    """Python 3.14 binds a `functools.partial` that is a class attribute, like a function."""

    def init(size, job, key):
        return jnp.ones(size) @ jnp.ones(3)

    job = types.SimpleNamespace(rules=[])
    job.init = types.MethodType(functools.partial(init, 8), job)
    assert sources_of(job) == [Path(__file__).resolve()]
    with pytest.raises(mw.JobError, match=r"`init` of the job 'my' failed\."), job_errors(job, "my"):
        mw.abstract_init(job.init)


def test_errors_outside_a_job_pass_through(folder):
    job = mw.load_job("my_job:job")
    with pytest.raises(mw.MeshError, match="no mesh"), job_errors(job, "my"):
        raise mw.MeshError("no mesh")
    with pytest.raises(TypeError), job_errors(job, "my"):
        jax.eval_shape(len, 3)


def test_a_file_imports_its_siblings(folder, monkeypatch):
    """As with `python file.py`, from any current directory, and also when a function imports them later."""
    job = "import meshwright as mw\nimport my_sizes\ndef init(key):\n    import my_late\n    return my_late.name\n"
    job += "job = mw.Job(init=init, rules=[], mesh=my_sizes.mesh)\n"
    for name, mesh in (("one", "dp:8"), ("two", "fsdp:8")):
        (folder / name).mkdir()
        (folder / name / "my_train.py").write_text(job)
        (folder / name / "my_sizes.py").write_text(f"mesh = {mesh!r}\n")
        (folder / name / "my_late.py").write_text(f"name = {name!r}\n")
    assert mw.load_job("one/my_train.py:job").mesh == "dp:8"
    monkeypatch.chdir(folder / "two")
    two = mw.load_job("my_train.py:job")  # its siblings have the same names
    assert (two.mesh, two.init(None)) == ("fsdp:8", "two")


def test_any_object_with_these_attributes_is_a_job(folder, monkeypatch):
    module = types.ModuleType("my_made")
    module.job = types.SimpleNamespace(init=lambda key: {}, rules=[])
    monkeypatch.setitem(sys.modules, "my_made", module)
    assert mw.load_job("my_made:job") is module.job
