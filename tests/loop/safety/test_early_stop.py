"""Early stopping: the right step, the best checkpoint, and the same end after a kill or a rollback."""

import json
import math
from types import SimpleNamespace

import pytest

from meshwright.checkpoint import Keep
from meshwright.errors import ConfigError
from meshwright.loop.safety.early_stop import EarlyStop


@pytest.mark.parametrize(
    ("monitor", "values", "best", "stops"),
    [
        ("loss:min", [3.0, 2.0, 2.5, 2.1], (2, 2.0), True),
        ("loss:min", [3.0, 2.0, 2.5, 1.9], (4, 1.9), False),
        ("accuracy:max", [0.5, 0.6, 0.6, 0.6], (2, 0.6), True),
        ("eval/accuracy:max", [0.5, 0.4, 0.6], (3, 0.6), False),
        ("loss:min", [math.nan, math.inf], None, True),
        ("loss:min", [3.0, math.nan, math.nan], (1, 3.0), True),
        ("loss:min", [], None, False),
    ],
)
def test_the_best_evaluation_and_the_end(monitor, values, best, stops):
    early = EarlyStop(2, monitor)
    for step, value in enumerate(values, start=1):
        assert not early.is_exhausted
        early.add(step, value)
    assert (early.best, early.is_exhausted) == (best, stops)
    again = EarlyStop(2, monitor)
    again.restore(json.loads(json.dumps(early.state)))
    assert (again.best, again.is_exhausted) == (best, stops)


def test_a_rollback_forgets_later_evaluations():
    early = EarlyStop(1)
    for step, value in ((1, 3.0), (2, 2.0), (3, 4.0)):
        early.add(step, value)
    early.on_rollback(SimpleNamespace(number=1))
    assert (early.best, early.is_exhausted) == ((1, 3.0), False)


def test_the_best_checkpoint_is_kept():
    checkpoints = SimpleNamespace(keep=Keep(last=1))
    early = EarlyStop(9, checkpoints=checkpoints)
    for step, value in ((10, 3.0), (20, 2.0), (30, 4.0), (40, 4.0)):
        early.add(step, value)
    assert checkpoints.keep.removable([10, 20, 30, 40]) == [10, 30]


def test_wrong_options(make_config):
    with pytest.raises(ConfigError, match=r"monitor 'accuracy' does not say .*\nhint: use NAME:min or NAME:max"):
        make_config(patience=1, monitor="accuracy")
    with pytest.raises(ConfigError, match="--patience needs evaluations, but --eval-every is 0"):
        make_config(patience=1, eval_every=0)
    with pytest.raises(ConfigError, match="--monitor accuracy:max has no effect without --patience"):
        make_config(monitor="accuracy:max")
    with pytest.raises(ConfigError, match="patience=0 is out of range"):
        make_config(patience=0)


def test_an_unknown_metric_is_named(make_config):
    loop = SimpleNamespace(number=1)
    with pytest.raises(ConfigError, match=r"'acuracy' is not a metric .*\nhint: did you mean 'accuracy'"):
        EarlyStop(1, "acuracy:max").on_evaluation(loop, {"eval/accuracy": 0.5, "eval/loss": 1.0})
    with pytest.raises(ConfigError, match=r"'confusion' is not a number.\nhint: use one of: loss"):
        EarlyStop(1, "confusion:max").on_evaluation(loop, {"eval/confusion": [[1]], "eval/loss": 1.0})
