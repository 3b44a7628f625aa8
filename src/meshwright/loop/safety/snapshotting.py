"""Takes snapshots in host memory during training, if the launcher asked for them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshwright.checkpoint.snapshot.snapshots import Snapshots, open_snapshots
from meshwright.distributed.agreement import together
from meshwright.errors import ConfigError
from meshwright.launch.memory_folder import EVERY, FOLDER
from meshwright.loop.callbacks import Callback

if TYPE_CHECKING:
    from meshwright.loop.decisions import RunSetup
    from meshwright.loop.fit import Loop


def find_snapshots(setup: RunSetup) -> Snapshots | None:
    """Returns the snapshots of a run whose launcher asked for them, if there is memory for them.

    A new run without the memory is refused. A resumed one, which may have lost a host, continues without snapshots.
    """
    folder = os.environ.get(FOLDER)
    if folder is None:
        return None
    tell, every = setup.tell, os.environ.get(EVERY, "")
    snapshots = together("preparing snapshots", lambda: open_snapshots(folder, every, tell=tell))
    try:
        text = snapshots.require_memory(setup.layout)
    except ConfigError as error:
        if not setup.folder.resumed:
            raise
        snapshots.forget()  # they would be older than what this attempt trains
        tell(f"warning: the run continues without snapshots: {error}")
        return None
    tell(f"snapshots: every {snapshots.every} steps, in host memory ({text})")
    return snapshots


@dataclass
class Snapshotting(Callback):
    """Takes a snapshot every few steps; they are removed once the run has ended and saved its last step."""

    snapshots: Snapshots
    facts: Callable[[], Mapping[str, Any]]

    def is_due(self, loop: Loop) -> bool:
        return loop.number % self.snapshots.every == 0 and loop.number < loop.num_steps

    def after_step(self, loop: Loop) -> bool:
        if self.is_due(loop):
            with loop.timed("checkpoint"):
                # As before a checkpoint, the log comes first.
                loop.log.flush(durable=True)
                facts = {**self.facts(), "data": dict(loop.batches.state)}
                self.snapshots.take(loop.state, step=loop.number, layout=loop.step.layout, facts=facts)
        return False

    def on_end(self, loop: Loop, why: str) -> None:
        if loop.last_saved == loop.number:
            self.snapshots.forget()

    def on_exit(self, loop: Loop) -> None:
        self.snapshots.wait()
