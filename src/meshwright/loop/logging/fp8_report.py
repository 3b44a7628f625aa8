"""Says which matmuls of a run's compiled step really run in fp8."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from meshwright.hardware.chips import chip_of, multiplies_fp8
from meshwright.loop.logging.run_log import EVENTS
from meshwright.train.state import frozen_names

if TYPE_CHECKING:
    from meshwright.loop.decisions import RunSetup
    from meshwright.loop.logging.run_log import RunLog
    from meshwright.train import RunState

InspectFp8 = Callable[[str, Sequence[str], bool, Collection[str]], tuple[str, list[str], list[dict[str, Any]]]]
"""`inspect(text, names, emulates, frozen) -> (line, warnings, matmuls)`, from the text of the compiled step, the
parameters in fp8, whether the device has no fp8 matmuls, and the parameters without a gradient. A matmul is a dict with
its name, pass, dtypes, how and runs."""


def report_fp8(run: RunSetup, log: RunLog, state: RunState, inspect: InspectFp8 | None) -> None:
    """Compiles the step of a run in fp8, and prints how its matmuls run; does nothing in other precisions.

    The "fp8" event in `events.jsonl` and the report page list every matmul.
    """
    fp8 = run.dtypes.fp8
    if fp8 is None:
        return
    if inspect is None:
        run.tell("fp8: the compiled step was not checked for matmuls that run in another dtype")
        return
    text = run.step.compile(run.job.batch).as_text()
    device = run.layout.mesh.devices.flat[0]
    emulates = not multiplies_fp8(device.platform, chip_of(device.device_kind))
    params = run.layout.abstract.params
    line, warnings, matmuls = inspect(text, fp8.names(params), emulates, frozen_names(run.job, params))
    skipped = fp8.skipped(params)
    if skipped:
        line += f"; too narrow for fp8: {', '.join(skipped)}"
    run.tell(f"{line} (listed in {run.folder.shown}/{EVENTS})")
    log.event("fp8", int(state.step), line, matmuls=matmuls)
    for warning in warnings:
        run.tell(f"warning: {warning}")
        log.event("warning", int(state.step), warning)
