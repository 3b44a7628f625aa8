"""The line that a step writes into the log."""

import numpy as np
import pytest

from meshwright.loop import Loop
from meshwright.loop.callbacks import StepRecord
from meshwright.loop.logging.run_log import RunLog, read_lines
from meshwright.loop.logging.step_log import StepLog


@pytest.fixture
def line_of(tmp_path):
    """Returns the line that a step log writes for step 5, which took 2 seconds, 0.5 of them for an evaluation."""

    def line_of(step_log):
        metrics = {"loss": 1.0, "skipped": 2}
        record = StepRecord(5, metrics, first_row=0, seconds=2.0, spent={"eval": 0.5})
        with RunLog(tmp_path, tensorboard=False) as log:
            step_log.on_metrics(Loop(None, 9, log), record)
        (line,) = read_lines(tmp_path / "metrics.jsonl")
        return line

    return line_of


def test_skipped_steps_do_not_advance_the_schedule(line_of):
    line = line_of(StepLog(np.arange(9) / 10))
    assert (line["step"], line["learning_rate"]) == (5, 0.2)


def test_rates_leave_out_evaluations(line_of):
    line = line_of(StepLog(flops_per_step=3e15, peak_flops=4e15, rows_per_step=6))
    assert (line["mfu"], line["rows_per_second"]) == (0.5, 4.0)
