"""The initial state of a run: freshly initialized, or restored from its last good checkpoint."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from meshwright.bounded_reader import require_fields
from meshwright.checkpoint import Checkpoints
from meshwright.checkpoint.manifest import model_text, parse_model
from meshwright.checkpoint.restoring import Restored
from meshwright.checkpoint.snapshot import Snapshots
from meshwright.distributed.agreement import bytes_from_first, from_first, together
from meshwright.errors import CheckpointError, ConfigError, FileFormatError
from meshwright.layout.leaf import count_leaves
from meshwright.loop.folder.run_dir import NOT_OF_THE_RUN
from meshwright.loop.logging.run_log import EVENTS, RunLog, read_lines
from meshwright.loop.logging.run_stats import checkpoint_facts
from meshwright.loop.settings.config import TrainConfig
from meshwright.loop.settings.optimizers import make_learning_rate
from meshwright.loop.weights.adapted_weights import as_bases
from meshwright.loop.weights.initial_adapters import read_adapters
from meshwright.loop.weights.initial_weights import StepWeights, choose_leaves, open_weights, params_leaves
from meshwright.train import RunState, init_state

if TYPE_CHECKING:
    from meshwright.loop.decisions import RunSetup


MAY_CHANGE = ("dropout", "chunk_size")
"""Model fields that a resumed run may change, because the parameters keep their meaning."""


@dataclass(frozen=True)
class RunStart:
    """The starting point of a run.

    Args:
        event: text of the start event in the log.
        said: lines to print.
        facts: further fields of the start event.
        data: position in the data, or None for its beginning.
        spikes: saved state of the `SpikeGuard`, or None.
        evaluations: saved state of the `EarlyStop`, or None.
    """

    state: RunState
    event: str
    said: Sequence[str] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] | None = None
    spikes: Mapping[str, Any] | None = None
    evaluations: Mapping[str, Any] | None = None

    @property
    def step(self) -> int:
        """Number of steps taken before."""
        return int(self.state.step)

    def announce(self, run: RunSetup, log: RunLog, *, began: float) -> None:
        """Prints and logs the start; `began` is the time at which this attempt began."""
        facts = {**self.facts, "began": began}
        if run.folder.resumed:
            facts["lost"] = log.lost_after(self.step)
            log.rewind(self.step)
        log.event("resume" if run.folder.resumed else "start", self.step, self.event, **facts)
        for text in self.said:
            run.tell(text)


def find_start(run: RunSetup, checkpoints: Checkpoints, snapshots: Snapshots | None = None) -> RunStart:
    """Returns the initial state, or that of the last good checkpoint or snapshot; neither writes nor prints."""
    config = run.config
    restored, skipped = _restore(run, checkpoints, snapshots) if run.folder.resumed else (None, [])
    if restored is None:
        event, said = f"started on {run.choice.mesh}", []
        if run.folder.resumed:
            event = "started again: there was no checkpoint"
            said = ["starting again from step 0: the run ended before its first checkpoint"]
        elif config.run.or_start:
            said = [f"starting a new run: {run.folder.shown} holds none to resume"]
        said = [*skipped, *said]
        if run.origin is None:
            return RunStart(_new_state(run, None), event, said)
        return _start_from(run, event, said)
    _require_known_facts(restored.facts, restored.step)
    if restored.step > config.run.steps:
        raise ConfigError(
            f"{run.folder.shown} is already at step {restored.step}, beyond --steps {config.run.steps}.",
            hint="raise --steps.",
        )
    _require_same_model(run, restored.facts)
    text = f"resumed from step {restored.step} on {run.choice.mesh}"
    undone = json.loads(bytes_from_first(json.dumps(_rolled_back(run.folder.path / EVENTS, restored.step)).encode()))
    data = undone if undone is not None else restored.facts.get("data")
    return RunStart(
        restored.state,
        text,
        [*skipped, *restored.notes, *_changes(run, restored.facts, restored.step), text],
        {"notes": [*skipped, *restored.notes]},
        data,
        restored.facts.get("spikes"),
        restored.facts.get("evaluations"),
    )


def _restore(run: RunSetup, checkpoints: Checkpoints, snapshots: Snapshots | None) -> tuple[Restored | None, list[str]]:
    """Returns the newest good state, of a snapshot or a checkpoint, and notes on newer snapshots that it skipped."""
    latest = checkpoints.latest()
    # Process 0 decides: the processes of a run in a store may have folders of their own.
    newest = from_first(-1 if latest is None else latest)
    if snapshots is None:
        return (None if newest < 0 else checkpoints.restore(run.layout, cast=run.config.run.cast)), []
    snapshot, skipped = snapshots.restore(run.layout, after=newest)
    if snapshot is not None or newest < 0:
        return snapshot, skipped
    saved = checkpoints.restore(run.layout, cast=run.config.run.cast)
    if saved.step < newest:  # a later checkpoint is damaged
        snapshot, more = snapshots.restore(run.layout, after=saved.step)
        skipped = [*skipped, *more]
    if snapshot is not None:
        return dataclasses.replace(snapshot, notes=[*saved.notes, *snapshot.notes]), skipped
    return saved, skipped


def _require_known_facts(facts: Mapping[str, Any], step: int) -> None:
    """Raises if the facts of a checkpoint do not have the form in which a run writes them."""
    kinds: dict[str, Any] = dict.fromkeys(("config", "data", "spikes", "evaluations"), (dict, type(None)))
    kinds |= {"model": (dict, str, type(None)), "precision": (str, type(None))}
    where = f"the facts of checkpoint {step}"
    try:
        require_fields({**dict.fromkeys(kinds), **facts}, kinds, where=where)
        if isinstance(facts.get("model"), dict):
            require_fields(facts["model"], {"class": str, "fields": dict}, where=f"`model` in {where}")
    except FileFormatError as error:
        raise CheckpointError(str(error), hint="restore a backup, or move this checkpoint elsewhere.") from None


def _new_state(run: RunSetup, given: Mapping[str, Any] | None) -> RunState:
    key = jax.random.key(run.config.run.seed)
    return init_state(run.job, run.optimizer, run.layout, key, precision=run.dtypes, given=given)


def _start_from(run: RunSetup, event: str, said: list[str]) -> RunStart:
    """Returns the state with the weights of `--init-from`; only a run without a checkpoint reads them again."""
    assert run.origin is not None
    options, origin = run.config.init, run.origin
    weights = origin.weights or open_weights(options)
    text = f"starting from {options.init_from}"
    if options.init_part == "all":
        assert isinstance(weights, StepWeights)
        restored = weights.restore(run.layout, cast=run.config.run.cast)
        if restored.step >= run.config.run.steps:
            raise ConfigError(
                f"--init-from is at step {restored.step}, so --steps {run.config.run.steps} leaves nothing to train.",
                hint=f"raise --steps above {restored.step}: with --init-part all, it counts the steps of --init-from.",
            )
        said = [*said, *restored.notes, f"{text}, step {restored.step}, with its optimizer state"]
        return RunStart(restored.state, f"{event} from {options.init_from}", said, {"init_from": options.init_from})

    def read() -> tuple[dict[str, Any], list[str]]:
        leaves, notes = choose_leaves(weights, run.layout, options)
        arrays, lora = weights.read(leaves, run.layout.mesh), getattr(run.job, "lora", None)
        if lora is not None:
            arrays = as_bases(arrays, params_leaves(run.layout), lora, run.layout.mesh)
        if options.init_adapters is not None:
            arrays |= read_adapters(options.init_adapters, params_leaves(run.layout), run.layout.mesh)
            notes = [*notes, f"adapters from {options.init_adapters}"]
        return arrays, notes

    given, notes = together("reading --init-from", read)
    said = [*said, f"{text}: {count_leaves(len(given))}", *(f"  {note}" for note in notes)]
    state = _new_state(run, given)
    return RunStart(state, f"{event} from {options.init_from}", said, {"init_from": options.init_from, "notes": notes})


def _require_same_model(run: RunSetup, facts: Mapping[str, Any]) -> None:
    """Raises if the checkpoint holds a different model, even one with the same parameter shapes."""
    saved, now = facts.get("model"), checkpoint_facts(run)["model"]
    if saved is None or now is None or what_must_match(saved, run.model) == what_must_match(now, run.model):
        return
    raise ConfigError(
        f"{run.folder.shown} holds a different model.\n  saved: {model_text(saved)}\n  now:   {model_text(now)}",
        hint="keep --model and --model-options unchanged, or start a new run.",
    )


def what_must_match(fact: Any, model: Any) -> Any:
    """Returns the class and fields of a checkpoint's model that must not change: all fields but `MAY_CHANGE`.

    Fields newer than the checkpoint get their defaults. Older checkpoints hold the model's `repr`, and checkpoints of
    custom jobs hold the job's name.
    """
    if isinstance(fact, str):
        try:
            fact = parse_model(fact)
        except (SyntaxError, ValueError):
            return fact
    known = dataclasses.fields(model) if type(model).__name__ == fact["class"] else ()
    defaults = {item.name: item.default for item in known if item.default is not dataclasses.MISSING}
    return fact["class"], {name: value for name, value in (defaults | fact["fields"]).items() if name not in MAY_CHANGE}


def _changes(run: RunSetup, facts: Mapping[str, Any], step: int) -> list[str]:
    """Describes the options that changed since the checkpoint."""
    before, now = facts.get("config") or {}, run.config.flat()
    changed = [
        f"{name} from {before[name]} to {value}"
        for name, value in now.items()
        if name in before and name not in NOT_OF_THE_RUN and before[name] != value
    ]
    if facts.get("precision") not in (None, run.precision):
        changed.append(f"compute precision from {facts['precision']} to {run.precision}")
    told = [f"changed since the checkpoint: {'; '.join(changed)}"] if changed else []
    decays = run.updates.is_builtin and before.get("schedule") == now["schedule"] != "constant"
    if before.get("steps") != now["steps"] and decays:
        old = TrainConfig().changed({name: value for name, value in before.items() if name in now})
        last, after = (
            float(make_learning_rate(config.optimizer, config.run.steps)(step)) for config in (old, run.config)
        )
        rates = f"changes from {last:.2e} to {after:.2e}" if f"{last:.2e}" != f"{after:.2e}" else f"stays {after:.2e}"
        told.append(f"the schedule now ends at step {now['steps']}; the learning rate {rates}")
    return told


def _rolled_back(events: Path, step: int) -> dict[str, Any] | None:
    """Returns the position in the data after a rollback to this checkpoint, or None if there was no rollback."""
    lines = read_lines(events) if events.is_file() else ()
    found = [event for event in lines if event.get("kind") == "rollback" and event.get("to") == step]
    return found[-1].get("data") if found else None


def step_in_log(path: Path, step: int, wanted: Callable[[Mapping[str, Any]], bool]) -> int | None:
    """Returns `step` if process 0's log has a line for it that satisfies `wanted`, else None."""
    found = False
    if jax.process_index() == 0 and step and path.is_file():
        found = any(line.get("step") == step and wanted(line) for line in read_lines(path))
    return step if from_first(int(found)) else None
