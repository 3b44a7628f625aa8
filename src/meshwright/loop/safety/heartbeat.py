"""What a run reports to its launcher: its folder and mesh, and every step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.launch.pulse import current_pulse
from meshwright.loop.callbacks import Callback, StepRecord

if TYPE_CHECKING:
    from meshwright.loop.decisions import RunSetup
    from meshwright.loop.fit import Loop


def report_run(setup: RunSetup) -> None:
    """Reports the run, and its local folder, before anything is written there, so that a restart can resume it."""
    pulse = current_pulse()
    if pulse is None:
        return
    folder = str(setup.folder.path.absolute())
    facts = {"run": setup.folder.url or folder, "folder": folder, "mesh": setup.choice.mesh}
    pulse.facts = facts | {"minibatches": setup.config.placement.minibatches}
    pulse.flush()


class Heartbeat(Callback):
    """Reports each finished step to the launcher, if there is one."""

    def on_metrics(self, loop: Loop, record: StepRecord) -> None:
        if (pulse := current_pulse()) is not None:
            pulse.step = record.number
