"""The line of each step in the log: metrics, learning rate, tokens per second, MFU, memory and goodput."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from meshwright.hardware.flops import utilization
from meshwright.loop.callbacks import Callback, StepRecord
from meshwright.loop.logging.memory_use import MemoryMeter

if TYPE_CHECKING:
    from meshwright.loop.fit import Loop
    from meshwright.loop.logging.goodput import RunningGoodput


@dataclass
class StepLog(Callback):
    """Logs the metrics of every step, with learning rate, tokens per second, MFU, memory and goodput.

    Args:
        learning_rates: learning rate of each step.
        counts_tokens: whether the `tokens` metric counts tokens; if so, log tokens per second, else rows per second.
        flops_per_step: FLOPs of the model per step, over all devices; MFU needs it and `peak_flops`.
        peak_flops: peak FLOP/s of all devices together.
        rows_per_step: rows of a batch.
        goodput: goodput of the run so far.
        memory: reads the memory in use; a step may get a reading that is up to a second old.
    """

    learning_rates: Any = None
    counts_tokens: bool = True
    flops_per_step: float | None = None
    peak_flops: float | None = None
    rows_per_step: int | None = None
    goodput: RunningGoodput | None = None
    memory: MemoryMeter = field(default_factory=MemoryMeter)

    def on_metrics(self, loop: Loop, record: StepRecord) -> None:
        line, metrics = record.line, record.metrics
        if self.learning_rates is not None:
            # The schedule does not advance on skipped steps.
            taken = max(0, record.number - 1 - int(metrics.get("skipped", 0)))
            line["learning_rate"] = float(self.learning_rates[taken])
        training = record.seconds - record.spent.get("eval", 0.0) - record.spent.get("compile", 0.0)
        training = max(training, 1e-9)
        if self.goodput is not None:
            line["goodput"] = self.goodput.add(line["seconds"], line["time"])
        if "tokens" in metrics and self.counts_tokens:
            line["tokens_per_second"] = metrics["tokens"] / training
        elif self.rows_per_step is not None:
            line["rows_per_second"] = self.rows_per_step / training
        if self.flops_per_step and self.peak_flops:
            line["mfu"] = utilization(self.flops_per_step, training, self.peak_flops)
        line["memory_bytes"] = self.memory.read().of_a_step
        loop.log.metrics(record.number, line)
