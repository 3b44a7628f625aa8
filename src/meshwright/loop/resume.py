"""Where a run begins: at its first state, or at its last good checkpoint, and what has changed since."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from meshwright.checkpoint import Checkpoints
from meshwright.checkpoint.manifest import model_text
from meshwright.distributed.agreement import from_first
from meshwright.errors import ConfigError
from meshwright.loop.choices import make_schedule
from meshwright.loop.config import TrainConfig
from meshwright.loop.logging.run_log import EVENTS, RunLog, read_lines
from meshwright.loop.logging.run_stats import checkpoint_facts
from meshwright.loop.run_dir import NOT_OF_THE_RUN
from meshwright.train import RunState, init_state

if TYPE_CHECKING:
    from meshwright.loop.setup import RunSetup


MAY_CHANGE = ("dropout", "chunk_size")
"""Fields of a model that a resumed run may change: they do not change what its parameters mean."""


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

    def announce(self, run: RunSetup, log: RunLog) -> None:
        """Tells and writes down where the run begins, once nothing speaks against it."""
        if run.folder.resumed:
            log.rewind(self.step)
        log.event("resume" if run.folder.resumed else "start", self.step, self.event, **self.facts)
        for text in self.said:
            run.tell(text)


def find_start(run: RunSetup, checkpoints: Checkpoints) -> Start:
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


def _require_same_model(run: RunSetup, facts: Mapping[str, Any]) -> None:
    """Raises where the model computes something else with parameters of the same shapes."""
    saved, now = facts.get("model"), checkpoint_facts(run)["model"]
    if saved is None or now is None or what_must_match(saved, run.model) == what_must_match(now, run.model):
        return
    raise ConfigError(
        f"{run.folder.path} holds another model.\n  there: {model_text(saved)}\n  here:  {model_text(now)}",
        hint="leave --model and --model-options as they were, or start a new run.",
    )


def what_must_match(fact: Any, model: Any) -> Any:
    """Returns what of a checkpoint's model must not change: its class, and its fields but those in `MAY_CHANGE`.

    A field that the checkpoint does not know, since it is newer, has its default. Older checkpoints hold a model's
    `repr`; a job of one's own is only known by its name.
    """
    if isinstance(fact, str):
        try:
            call = ast.parse(fact, mode="eval").body
            if not isinstance(call, ast.Call):
                return fact
            values = {str(item.arg): ast.literal_eval(item.value) for item in call.keywords}
        except (SyntaxError, ValueError):
            return fact
        fact = {"class": ast.unparse(call.func), "fields": values}
    known = dataclasses.fields(model) if type(model).__name__ == fact["class"] else ()
    defaults = {item.name: item.default for item in known if item.default is not dataclasses.MISSING}
    return fact["class"], {name: value for name, value in (defaults | fact["fields"]).items() if name not in MAY_CHANGE}


def _changes(run: RunSetup, facts: Mapping[str, Any], step: int) -> list[str]:
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
    lines = read_lines(events) if events.is_file() else ()
    found = [event for event in lines if event.get("kind") == "rollback" and event.get("to") == step]
    return found[-1].get("data") if found else None


def step_in_log(path: Path, step: int, wanted: Callable[[Mapping[str, Any]], bool]) -> int | None:
    """Returns a step if process 0's log holds a line of it that is wanted, else None."""
    found = False
    if jax.process_index() == 0 and step and path.is_file():
        found = any(line.get("step") == step and wanted(line) for line in read_lines(path))
    return step if from_first(int(found)) else None
