"""Runs with a pipeline schedule: they resume with another one, and options without effect are errors."""

import faulthandler

import numpy as np
import pytest

from meshwright.errors import ConfigError, MeshwrightError
from meshwright.loop.run import train

from .tiny_run import QUIET, fit_folder

PIPELINE = {
    "model_options": ["num_layers=4", "d_model=16", "d_ff=16", "num_heads=2", "dropout=0.1"],
    "mesh": "pp:2,dp:4",
    "steps": 4,
    "checkpoint_every": 2,
    "eval_every": 4,
    "microbatches": 2,
}


@pytest.fixture(autouse=True)
def time_limit():
    """Ends the process on a deadlock, which compiled code cannot interrupt."""
    faulthandler.dump_traceback_later(300, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


def test_a_run_resumes_with_another_schedule(make_config, read_run, stop_at, tmp_path):
    """1F1B to step 2, then ZB-V, equals 1F1B all the way: parameters are stored in the same order."""
    whole = make_config(**PIPELINE, pipeline="1f1b", run=str(tmp_path / "whole"))
    uninterrupted = train(whole, **QUIET)
    config = make_config(**PIPELINE, pipeline="1f1b")
    stop_at(2)
    assert train(config, **QUIET).why == "preempted"
    stop_at()
    said = []
    resumed = train(config.changed({"resume": True, "pipeline": "zb-v"}), say=said.append)
    assert any("pipeline: zb-v, 2 stages, 2 microbatches; 14 ticks, 14.3% idle" in line for line in said)
    (steps, evaluations, _), (again, again_evaluations, _) = (read_run(fit_folder(c)) for c in (whole, config))
    assert [line["step"] for line in again] == [1, 2, 3, 4]
    np.testing.assert_allclose([x["loss"] for x in again], [x["loss"] for x in steps], rtol=1e-5)
    np.testing.assert_allclose(again_evaluations[4], evaluations[4], rtol=1e-5)
    one, other = (run.state.params["layers"]["mlp"]["up"] for run in (resumed, uninterrupted))
    np.testing.assert_allclose(one, other, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mesh": "dp:8"}, "--pipeline and --microbatches would have no effect: the mesh has no axis pp"),
        ({"view": "global"}, r"--pipeline and --microbatches would have no effect: XLA runs no pipeline(.|\n)*local"),
        (
            {"microbatches": 3},
            r"8 rows into 1 minibatches of 3 microbatches for 4 devices.\nhint: use --batch-size 12",
        ),
        ({"pipeline_rounds": 2}, "'1f1b' has 1 virtual stage per device; got 2"),
        (
            {"pipeline": "zb-v", "model_options": ["num_layers=3"], "pad": ["layers/"]},
            "3 layers cannot be cut into 2 x 2",
        ),
        ({"microbatches": 0}, "microbatches=0 is out of range"),
    ],
)
def test_options_without_effect_are_errors(make_config, options, message):
    with pytest.raises((ConfigError, MeshwrightError), match=message):
        train(make_config(**(PIPELINE | {"pipeline": "1f1b"} | options)), **QUIET)
