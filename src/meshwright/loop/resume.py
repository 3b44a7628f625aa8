"""Where a run begins: at its first state, or at its last good checkpoint, and what has changed since."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from meshwright.checkpoint import Checkpoints
from meshwright.errors import ConfigError
from meshwright.loop.choices import make_schedule
from meshwright.loop.config import TrainConfig
from meshwright.loop.logging.json_lines import read_lines
from meshwright.loop.logging.run_log import EVENTS, RunLog
from meshwright.loop.logging.run_stats import checkpoint_facts
from meshwright.loop.run_dir import NOT_OF_THE_RUN
from meshwright.train import RunState, init_state

if TYPE_CHECKING:
    from meshwright.loop.setup import Setup


@dataclass(frozen=True)
class Start:
    """What a run begins with.

    Args:
        data: where the data stands; None at its beginning.
        spikes: the losses that a guard against jumps remembers; None where there was no such guard.
        event: what is written down about it; `facts` go with it.
        said: what is told about it.
    """

    state: RunState
    event: str
    said: Sequence[str] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] | None = None
    spikes: Mapping[str, Any] | None = None

    @property
    def step(self) -> int:
        """How many steps were taken before it."""
        return int(self.state.step)

    def announce(self, run: Setup, log: RunLog) -> None:
        """Tells and writes down where the run begins, once nothing speaks against it."""
        if run.folder.resumed:
            log.rewind(self.step)
        log.event("resume" if run.folder.resumed else "start", self.step, self.event, **self.facts)
        for text in self.said:
            run.tell(text)


def find_start(run: Setup, checkpoints: Checkpoints) -> Start:
    """Returns the first state, or that of the last good checkpoint; nothing is written or told yet."""
    config = run.config
    if not run.folder.resumed or checkpoints.latest() is None:
        event, said = f"started on {run.choice.mesh}", []
        if run.folder.resumed:
            event = "no checkpoint was there: started again"
            said = ["the run ended before its first checkpoint: it starts again"]
        elif config.run.or_start:
            said = [f"there was no run in {run.folder.path} to resume: it starts"]
        key = jax.random.key(config.run.seed)
        return Start(init_state(run.job, run.optimizer, run.layout, key, precision=run.precision), event, said)
    restored = checkpoints.restore(run.layout, cast=config.run.cast)
    if restored.step > config.run.steps:
        raise ConfigError(
            f"{run.folder.path} stands at step {restored.step} of {config.run.steps} already.",
            hint="ask for more with --steps.",
        )
    _require_same_model(run, restored.facts)
    text = f"resumed from the checkpoint of step {restored.step} on {run.choice.mesh}"
    undone = _rolled_back(run.folder.path / EVENTS, restored.step)
    data = undone if undone is not None else restored.facts.get("data")
    return Start(
        restored.state,
        text,
        [*restored.notes, *_changes(run, restored.facts, restored.step), text],
        {"notes": restored.notes},
        data,
        restored.facts.get("spikes"),
    )


def _require_same_model(run: Setup, facts: Mapping[str, Any]) -> None:
    """Raises where the model computes something else with parameters of the same shapes; dropout may change."""
    saved, now = facts.get("model"), checkpoint_facts(run)["model"]
    if saved is None or now is None or _what_must_match(saved) == _what_must_match(now):
        return
    raise ConfigError(
        f"{run.folder.path} holds another model.\n  there: {saved}\n  here:  {now}",
        hint="leave --model and --model-options as they were, or start a new run.",
    )


def _what_must_match(model: str) -> str:
    """Returns a model's fields without those that a resumed run may change: dropout, and how an xLSTM cuts time.

    Example:
        >>> _what_must_match("XLSTM(d_ff=8, dropout=0.1, chunk_size=64)")
        'XLSTM(d_ff=8, dropout, chunk_size)'
    """
    return re.sub(r"\b(dropout|chunk_size)=[^,)]*", r"\1", model)


def _changes(run: Setup, facts: Mapping[str, Any], step: int) -> list[str]:
    """Returns in words what is not as it was when the checkpoint was written."""
    before, now = facts.get("config", {}), run.config.flat()
    changed = [
        f"{name} from {before[name]} to {value}"
        for name, value in now.items()
        if name in before and name not in NOT_OF_THE_RUN and before[name] != value
    ]
    if facts.get("precision") not in (None, run.precision):
        changed.append(f"what it computes in, from {facts['precision']} to {run.precision}")
    told = [f"changed since the checkpoint: {'; '.join(changed)}"] if changed else []
    if before.get("steps") != now["steps"] and before.get("schedule") == now["schedule"] != "constant":
        old = TrainConfig().changed({name: value for name, value in before.items() if name in now})
        last, after = (float(make_schedule(config.optimizer, config.run.steps)(step)) for config in (old, run.config))
        rates = f"{after:.2e} instead of {last:.2e}" if f"{last:.2e}" != f"{after:.2e}" else f"{after:.2e} as before"
        told.append(f"the schedule now ends at step {now['steps']}: the rate here is {rates}")
    return told


def _rolled_back(events: Path, step: int) -> dict[str, Any] | None:
    """Returns where the data goes on where a run was rolled back to this checkpoint, and stopped before the next."""
    if not events.is_file():
        return None
    found = None
    for event in read_lines(events):
        if event.get("kind") == "rollback" and event.get("to") == step:
            found = event.get("data")
    return found


def was_evaluated(metrics: Path, step: int) -> bool:
    """Says whether the log holds an evaluation of a step."""
    if jax.process_index() != 0 or not step or not metrics.is_file():
        return False
    return any(line.get("step") == step and "eval/loss" in line for line in read_lines(metrics))


def was_sampled(events: Path, step: int) -> bool:
    """Says whether the log holds text that the model wrote when it stood at a step, trained."""
    if jax.process_index() != 0 or not step or not events.is_file():
        return False
    return any(
        (line.get("kind"), line.get("when"), line.get("step")) == ("sample", "after", step)
        for line in read_lines(events)
    )
