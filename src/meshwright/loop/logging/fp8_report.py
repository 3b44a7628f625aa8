"""Says which matmuls of a run's compiled step really run in fp8."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from meshwright.train.precision import Precision

if TYPE_CHECKING:
    from meshwright.loop.decisions import RunSetup
    from meshwright.loop.logging.run_log import RunLog
    from meshwright.train import RunState

InspectFp8 = Callable[[str, Sequence[str], str], tuple[str, list[str]]]
"""`inspect(text, names, platform) -> (line, warnings)`, from the text of the compiled step and the fp8 parameters."""


def report_fp8(run: RunSetup, log: RunLog, state: RunState, inspect: InspectFp8 | None) -> None:
    """Compiles the step of a run in fp8, and prints and logs how its matmuls run; does nothing in other precisions."""
    fp8 = Precision.named(run.precision).fp8
    if fp8 is None:
        return
    if inspect is None:
        run.tell("fp8: the compiled step was not checked for matmuls that run in another dtype")
        return
    text = run.step.compile(run.job.batch).as_text()
    platform = run.layout.mesh.devices.flat[0].platform
    line, warnings = inspect(text, fp8.names(run.layout.abstract.params), platform)
    skipped = fp8.skipped(run.layout.abstract.params)
    if skipped:
        line += f"; too narrow for fp8: {', '.join(skipped)}"
    run.tell(line)
    log.event("fp8", int(state.step), line)
    for warning in warnings:
        run.tell(f"warning: {warning}")
        log.event("warning", int(state.step), warning)
