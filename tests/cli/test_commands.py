import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest

import meshwright as mw
from meshwright import P
from meshwright.cli import main

SOURCE = """
import jax.numpy as jnp
import meshwright as mw
from meshwright import P

def init(key):
    return {"layers": [{"w": jnp.ones((8, 8))} for _ in range(3)], "b": jnp.ones(6)}

good = mw.Job(init=init, rules=[("w", P("fsdp", "tp")), ("b", P())], mesh="fsdp:4,tp:2")
bad = mw.Job(init=init, rules=[("w", P("fsdp", "tp")), ("b", P("fsdp"))], mesh="fsdp:4,tp:2")
odd = mw.Job(init=init, rules=[("w", P("fsdp", "tp")), ("b", P()), ("nothing", P())], mesh="fsdp:4,tp:2")
homeless = mw.Job(init=init, rules=[("w", P()), ("b", P())])
"""


@pytest.fixture
def cli(tmp_path, monkeypatch, capsys):
    """Runs the command in this process, in a folder with a job; returns exit code, stdout and stderr."""
    (tmp_path / "cli_job.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(*args):
        with pytest.raises(SystemExit) as ended:
            main([str(arg) for arg in args])
        captured = capsys.readouterr()
        return ended.value.code or 0, captured.out, captured.err

    yield run
    sys.modules.pop("cli_job", None)


# --- rules ---


def test_rules_shows_the_layout_and_the_report(cli):
    code, out, err = cli("rules", "cli_job:good")
    assert (code, err) == (0, "")
    assert "layers/{0..2}/w (x3)  8x8    float32  0 `w`  P('fsdp', 'tp')          96 B" in out
    assert "4 leaves on fsdp=4 x tp=2: 792 B in total, 120 B per device" in out
    assert out.rstrip().endswith("no problems found.")


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["cli_job:good", "--all"], 0, "layers/2/w"),
        (["cli_job.py:good"], 0, "layers/{0..2}/w"),
        (["cli_job:good", "--mesh", "fsdp:2,tp:-1", "--num-devices", "16"], 0, "fsdp=2 x tp=8"),
        (["cli_job:odd"], 0, "rule 2 `nothing` matches no leaf"),
        (["cli_job:bad"], 1, "dim 0 has size 6; `fsdp` has 4 devices: 6 % 4 = 2"),
        (["cli_job:bad", "--pad", "b"], 0, "b is padded: 6 (stored 8)"),
        (["cli_job:good", "--mesh", "x:8"], 1, "names axis 'fsdp'; the mesh has axes: x"),
        (["cli_job:good", "--picture", "layers/0/w"], 0, "8 tiles of 2x4, each on one device"),
    ],
)
def test_rules_output(cli, arguments, code, text):
    result = cli("rules", *arguments)
    assert result[0] == code
    assert text in result[1]
    assert result[2] == ""


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["no_such_module:job"], "error: no module named 'no_such_module'.\nhint: "),
        (["cli_job:goood"], "error: module 'cli_job' has no attribute 'goood'.\nhint: did you mean 'good'?"),
        (["cli_job"], "error: 'cli_job' does not name a job.\nhint: "),
        (["cli_job:homeless"], "error: neither --mesh nor the job sets a mesh.\nhint: "),
        (["cli_job:good", "--mesh", "fsdp"], "error: mesh 'fsdp': cannot parse 'fsdp'.\nhint: "),
        (["cli_job:good", "--mesh", "fsdp:-1"], "has a size of -1"),
        (["cli_job:good", "--mesh", "fsdp:2,tp:2,sp:2"], "error: this job does not use mesh axis 'sp'.\nhint: "),
        (["cli_job:good", "--picture", "layers/9/w"], "error: the layout has no leaf 'layers/9/w'.\nhint: "),
    ],
)
def test_rules_errors_go_to_stderr(cli, arguments, text):
    code, out, err = cli("rules", *arguments)
    assert (code, out) == (1, "")
    assert text in err


def test_rules_json_reads_back(cli):
    code, out, _ = cli("rules", "cli_job:good", "--json")
    assert code == 0
    layout = mw.Layout.from_json(out)
    assert layout["layers/1/w"].spec == P("fsdp", "tp")
    assert layout.bytes_per_device == 120


def test_rules_svg(cli, tmp_path):
    code, _, _ = cli("rules", "cli_job:good", "--picture", "layers/0/w", "--svg", tmp_path / "w.svg")
    assert code == 0
    assert ElementTree.parse(tmp_path / "w.svg").getroot().tag.endswith("svg")


# --- doctor ---


def test_doctor(cli):
    code, out, err = cli("doctor")
    assert (code, err) == (0, "")
    assert "devices    8 x cpu (cpu)" in out
    assert "self-check passed: a tree sharded over 8 devices came back unchanged" in out
    assert "plan layouts for any mesh" in out


def test_doctor_json(cli):
    code, out, _ = cli("doctor", "--json")
    assert code == 0
    found = json.loads(out)
    assert found["healthy"] is True
    assert len(found["devices"]) == 8
    assert found["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    for ability in found["abilities"]:
        assert ability["ready"] or ability["fix"] or ability["what"] == "train on simulated devices"


def test_doctor_reports_a_failed_self_check(cli, monkeypatch):
    def fail(*args):
        raise RuntimeError("no memory left")

    monkeypatch.setattr("meshwright.cli.doctor.make_layout", fail)
    code, out, _ = cli("doctor")
    assert code == 1
    assert "self-check FAILED: RuntimeError: no memory left" in out


# --- verify ---

VERIFY_SOURCE = """
import jax
import jax.numpy as jnp
import meshwright as mw
from meshwright import P

def init(key):
    return {"w": jax.random.normal(key, (8,))}

def loss(params, batch, rng):
    return jnp.mean((batch["x"] @ params["w"]) ** 2), {}

def mesh_loss(params, batch, rng):
    # Wrong on a mesh: the mean is over the rows of one device only.
    return loss(params, batch, rng)[0] * 16 / batch["x"].shape[0], {}

batch = {"x": jax.ShapeDtypeStruct((16, 8), "float32")}
good = mw.Job(init=init, rules=[("w", P("fsdp"))], loss=loss, batch=batch)
bad = mw.Job(init=init, rules=[("w", P("fsdp"))], loss=mesh_loss, batch=batch)
"""


@pytest.fixture
def verify_cli(cli, tmp_path):
    (tmp_path / "verify_job.py").write_text(VERIFY_SOURCE)
    yield lambda *args: cli("verify", *args)
    sys.modules.pop("verify_job", None)


def test_verify(verify_cli):
    code, out, err = verify_cli(
        "verify_job:good", "--mesh", "fsdp:8", "dp:2,fsdp:4", "--view", "global", "--steps", "1"
    )
    assert code == 0
    assert "2 equal; 1 parameters, 16 rows, 1 step, relative tolerance 1e-05" in out
    assert err.splitlines()[0] == "comparing one device"
    assert "comparing dp:2,fsdp:4, global view" in err


def test_verify_names_the_likely_cause(verify_cli):
    arguments = ("verify_job:bad", "--mesh", "fsdp:4", "--view", "local", "--steps", "1")
    code, out, _ = verify_cli(*arguments)
    assert code == 1
    assert "likely cause: the loss is 4x the single-device value: summed twice over `fsdp` (4 devices)" in out
    code, out, _ = verify_cli(*arguments, "--json")
    assert code == 1
    found = json.loads(out)
    assert found["ok"] is False
    assert found["cases"][0]["causes"][0]["kind"] == "reduction"


def test_verify_simulates_devices(tmp_path):
    (tmp_path / "sub_job.py").write_text(VERIFY_SOURCE)
    arguments = ["verify", "sub_job:good", "--view", "global", "--steps", "1", "--devices", "4"]
    done = subprocess.run(
        [sys.executable, "-m", "meshwright", *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        env={key: value for key, value in os.environ.items() if key != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr
    # A job without a mesh is compared on each axis in turn; rules without optional axes need theirs on every mesh.
    assert "dp:4,fsdp:1" in done.stdout
    assert "2 equal" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["cli_job:good"], "error: verify: the job has no loss.\nhint: "),
        (["verify_job:good", "--mesh", "fsdp:16"], "error: the mesh fsdp=16 needs 16 devices, but there are 8."),
        (["verify_job:good", "--devices", "9"], "error: devices=9, but 8 are available."),
    ],
)
def test_verify_errors_go_to_stderr(verify_cli, arguments, text):
    code, out, err = verify_cli(*arguments)
    assert (code, out) == (1, "")
    assert text in err


# --- The command itself ---


@pytest.mark.parametrize(("arguments", "code"), [(["--help"], 0), ([], 2), (["nonsense"], 2), (["rules"], 2)])
def test_usage(cli, arguments, code):
    assert cli(*arguments)[0] == code


def test_python_dash_m(tmp_path):
    (tmp_path / "sub_job.py").write_text(SOURCE)
    done = subprocess.run(
        [sys.executable, "-m", "meshwright", "rules", "sub_job:bad"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1, done.stderr
    assert "6 % 4 = 2" in done.stdout
