"""Fuzzing finds planted bugs, shrinks them to a command that reproduces them, and accepts correct jobs."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import meshwright as mw
from meshwright import P
from meshwright.cli import main
from meshwright.parallel import is_manual
from meshwright.testing import assert_same_function
from meshwright.verify.fuzz import FuzzCase, FuzzReport, _Bench, fuzz
from meshwright.verify.random_masks import mask_names, with_random_masks
from meshwright.verify.report import Case

RULES = mw.Rules([("up", P("fsdp", "tp")), ("down", P("tp", "fsdp"))], optional_axes=("fsdp", "tp"))


def init(key):
    k_up, k_down = jax.random.split(key)
    return {"up": jax.random.normal(k_up, (8, 16)) / 3, "down": jax.random.normal(k_down, (16, 4)) / 4}


def make_batch(seed):
    generator = np.random.default_rng(seed)
    x, y = (generator.standard_normal((16, size)).astype(np.float32) for size in (8, 4))
    return {"x": x, "y": y, "mask": np.ones(16, np.float32)}


def loss(params, batch, rng, bug=""):
    h = jnp.tanh(batch["x"] @ params["up"]) @ params["down"]
    if is_manual("tp") and bug != "missing psum":
        h = lax.psum(h, "tp")
    if rng is not None and bug != "same keys":
        h = mw.parallel.dropout(h, 0.25, rng)
    elif rng is not None:
        plain = jax.random.wrap_key_data(jax.random.key_data(rng)[:2], impl="threefry2x32")
        h = h * jax.random.bernoulli(plain, 0.75, h.shape)
    errors = ((h - batch["y"]) ** 2).mean(-1) * batch["mask"]
    if bug == "wrong mean":
        return errors.sum() / batch["mask"].sum(), {}
    return (errors.sum(), batch["mask"].sum()), {}


class Job:
    """A job with a bug; the loss communicates over `tp` by itself."""

    rules, batch, local_axes = RULES, make_batch(0), ("tp",)
    init, make_batch = staticmethod(init), staticmethod(make_batch)

    def __init__(self, bug=""):
        self.loss = lambda params, batch, rng: loss(params, batch, rng, bug)


def test_a_correct_job():
    report = fuzz(Job(), 3, seed=0)
    report.require()
    assert len({one.mesh for one, _ in report.results}) > 1


@pytest.mark.slow  # each compiles a few programs until the bug shows, and a few more to shrink it
@pytest.mark.parametrize(
    ("bug", "mesh", "cause"),
    [
        ("missing psum", "tp:2", "a psum over `tp` is missing"),
        ("wrong mean", None, "the loss is an unweighted mean over"),
        ("same keys", None, "every device draws the same random numbers"),
    ],
)
def test_planted_bugs_are_found_and_shrunk(bug, mesh, cause):
    report = fuzz(Job(bug), 12, seed=0, name="my_job.py:job")
    assert not report.ok
    one, case = report.smallest
    assert case.verdict in ("different", "failed")
    # Two devices are enough for each of these bugs, in float32 without options.
    assert np.prod([int(size) for size in case.sizes.values()]) == 2 or one.num_minibatches == 2
    assert (one.precision, one.remat, one.sync) == ("float32", "none", None)
    assert mesh in (None, one.mesh)
    assert (one.mask is not None) == (bug == "wrong mean")
    assert cause in str(report)
    assert f"smallest failing case:\n  meshwright verify my_job.py:job --mesh {one.mesh} --view {one.view}" in str(
        report
    )


def test_the_time_limit():
    report = fuzz(Job(), 50, seconds=1e-9, seed=3)
    assert len(report.results) <= 1
    assert "50 wanted" in report.summary()


def test_axes_that_the_loss_does_not_know_are_refused_in_the_local_view():
    job = mw.Job(init=init, rules=RULES, loss=lambda *args: loss(*args, "missing psum"), batch=make_batch(0))
    bench = _Bench(job, None, optax.sgd(0.1), jax.devices())
    case = bench.compare(FuzzCase("tp:2", "local"))
    assert case.verdict == "skipped"
    assert "the loss does not communicate over mesh axis 'tp'" in case.message
    assert bench.compare(FuzzCase("fsdp:2", "local", 16)).verdict == "skipped"  # 16 rows cannot be split


def test_refusals_have_a_reason():
    message = "2 leaves do not fit the mesh pp=8:\n  `up` (rule 0): dim 0 has size 2; `pp` has 8 devices.\nhint: ..."
    case = Case("pp:8", "local", 1, "skipped", message=message)
    report = FuzzReport(((FuzzCase("pp:8", "local"), case),), None, 1, 0.0, "job")
    assert "refused: 2 leaves do not fit the mesh pp=8: `up` (rule 0): dim 0 has size 2" in str(report)


def test_cases_are_drawn_from_the_seed():
    bench = _Bench(Job(), None, None, jax.devices())
    draws = [[bench.draw(np.random.default_rng([seed, number])) for number in range(60)] for seed in (0, 0, 1)]
    assert draws[0] == draws[1] != draws[2]
    for name in ("view", "num_minibatches", "precision", "remat", "sync", "mask", "seed", "mesh"):
        assert len({getattr(one, name) for one in draws[0]}) > 1, name


def test_masks():
    batch = {"x": np.ones((8, 2)), "inner": {"weights": np.ones((8, 3), np.float32)}, "weighted": np.ones(8)}
    assert mask_names(batch) == ("inner/weights",)
    drawn = with_random_masks(batch, 0)
    assert 0 < drawn["inner"]["weights"].sum() < 24
    assert drawn["inner"]["weights"].dtype == np.float32
    assert drawn["x"] is batch["x"]


def test_bad_arguments():
    with pytest.raises(mw.MeshwrightError, match="at least 1 case"):
        fuzz(Job(), 0)
    with pytest.raises(mw.MeshwrightError, match="more than 0 seconds"):
        fuzz(Job(), 1, seconds=0)


# --- In a user's tests and on the command line ---


def test_assert_same_function():
    assert_same_function(Job(), meshes="dp:2,tp:2", num_steps=1, num_fuzzed=1)
    with pytest.raises(AssertionError, match=r"(?s)differs from the single-device step.*FAILED.*a psum over `tp`"):
        assert_same_function(Job("missing psum"), meshes="tp:2", views="local", num_steps=1)


def test_the_printed_command_reproduces_the_difference(tmp_path, monkeypatch, capsys):
    path = tmp_path / "fuzzed_job.py"
    path.write_text(
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import importlib.util\n"
        f"spec = importlib.util.spec_from_file_location('bugs', {__file__!r})\n"
        "bugs = importlib.util.module_from_spec(spec); spec.loader.exec_module(bugs)\n"
        "job = bugs.Job('wrong mean')\n"
    )
    monkeypatch.chdir(tmp_path)
    command = FuzzCase("dp:2", "local", mask=1).command("fuzzed_job.py:job").split()[1:]
    with pytest.raises(SystemExit) as ended:
        main([*command, "--devices", "8"])
    assert ended.value.code == 1
    assert "the loss is an unweighted mean over 2 devices" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main(["verify", "fuzzed_job.py:job", "--fuzz", "1", "--seed", "1", "--mesh", "dp:2"])
    assert ended.value.code == 1
    assert "--fuzz draws its own cases, so --mesh would have no effect" in capsys.readouterr().err
