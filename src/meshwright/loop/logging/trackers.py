"""Experiment trackers: TensorBoard, wandb and trackio, each imported only if used."""

from __future__ import annotations

import contextlib
import importlib
import json
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from meshwright.bounded_reader import read_json
from meshwright.errors import MeshwrightError
from meshwright.files import write_atomically

IDENTITIES = "trackers.json"


class TensorBoard:
    """TensorBoard event files; after a rewind, a new file hides the steps that are recomputed.

    It bypasses tensorboardX's queue, which blocks a run forever on a full disk.
    """

    label = "TensorBoard"

    def __init__(self, folder: Path, *, flush_seconds: float = 10.0) -> None:
        from tensorboardX import event_file_writer, summary
        from tensorboardX.proto import event_pb2

        self.folder, self._writers, self._summaries, self._protos = folder, event_file_writer, summary, event_pb2
        self._flush_seconds = flush_seconds
        self._flush_at = 0.0
        self._file: Any = None
        self._purge_step: int | None = None

    def metrics(self, step: int, values: Mapping[str, Any]) -> None:
        summary = self._summaries.Summary
        scalars = [summary.Value(tag=name, simple_value=value) for name, value in numbers(values)]
        self._write(step, values.get("time", time.time()), summary=summary(value=scalars))

    def event(self, kind: str, step: int, text: str) -> None:
        self._write(step, time.time(), summary=self._summaries.text(kind, text))

    def rewind(self, step: int, seen: int) -> None:
        """Prepares for recomputing the steps after `step`; `seen` is the last of them logged so far."""
        self.close()
        self._purge_step = step + 1

    def close(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            file.close()

    def _write(self, step: int, at: float, **what: Any) -> None:
        try:
            self._open().write_event(self._protos.Event(step=step, wall_time=at, **what))
            if time.monotonic() >= self._flush_at:
                self._open().flush()
                self._flush_at = time.monotonic() + self._flush_seconds
        except OSError:
            # Readers stop at a torn record, so continue in a new file.
            with contextlib.suppress(OSError):
                self.close()
            raise

    def _open(self) -> Any:
        if self._file is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            # File names have a resolution of one second, so add a unique suffix.
            self._file = self._writers.EventsWriter(str(self.folder / "events"), f".{uuid.uuid4().hex[:8]}")
            if self._purge_step is not None:
                start = self._protos.SessionLog(status=self._protos.SessionLog.START)
                event = self._protos.Event(step=self._purge_step, wall_time=time.time(), session_log=start)
                self._file.write_event(event)
        return self._file


class OnlineRun:
    """A wandb or trackio run; its id is stored in the run folder, so that a resumed run continues it."""

    def __init__(self, service: Literal["wandb", "trackio"], folder: Path, options: str | Mapping[str, Any]) -> None:
        try:
            module: Any = importlib.import_module(service)
        except ModuleNotFoundError as error:
            if error.name != service:
                raise
            raise MeshwrightError(f"{service} is not installed.", hint=f"run pip install {service}.") from None
        self.service, self.label, self._path = service, service.capitalize(), folder / IDENTITIES
        wanted = {"project": options} if isinstance(options, str) else dict(options)
        if "project" not in wanted:
            raise MeshwrightError(f"{service}= has no project.", hint=f'set {service}="my-project".')
        self._identity: dict[str, Any] = {"id": uuid.uuid4().hex[:12], "seen": -1}
        known = self._read().get(service)
        if isinstance(known, dict) and isinstance(known.get("id"), str) and type(known.get("seen")) is int:
            self._identity = known
        self._write()
        name, identity = folder.resolve().name, self._identity["id"]
        if service == "wandb":
            usual = {"name": name, "dir": str(folder), "id": identity}
        else:  # trackio identifies runs by name
            usual = {"name": f"{name}-{identity}"}
        self._run = module.init(**usual | wanted, resume="allow")

    def metrics(self, step: int, values: Mapping[str, Any]) -> None:
        # Online steps only increase, so do not send a step again.
        if step > self._identity["seen"]:
            self._run.log(dict(numbers(values)), step=step)

    def event(self, kind: str, step: int, text: str) -> None:
        del kind, step, text  # events are in the run's files and report only

    def rewind(self, step: int, seen: int) -> None:
        # Keep the larger one: a run killed twice may not get as far the second time.
        self._identity["seen"] = max(seen, self._identity["seen"])
        self._write()

    def close(self) -> None:
        self._run.finish()

    def _read(self) -> dict[str, Any]:
        return dict(read_json(self._path)) if self._path.exists() else {}

    def _write(self) -> None:
        write_atomically(self._path, json.dumps(self._read() | {self.service: self._identity}))


Tracker = TensorBoard | OnlineRun


def numbers(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yields the numeric values of a step, nested ones by joined names, without `step` and `time`.

    Example:
        >>> dict(numbers({"step": 3, "loss": 2.5, "seconds": {"data": 0.25}, "note": "fine"}))
        {'loss': 2.5, 'seconds/data': 0.25}
    """
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from numbers(value, f"{prefix}{name}/")
            continue
        value = plain(value)
        if isinstance(value, int | float) and not (not prefix and name in ("step", "time")):
            yield f"{prefix}{name}", float(value)


def plain(value: Any) -> Any:
    """Converts a value to JSON types, and NumPy and JAX numbers to Python numbers without loss.

    Non-finite numbers become `NaN` and `Infinity` in JSON, which `json.loads` reads.

    Example:
        >>> plain({"loss": np.float32(0.1), "seconds": {"step": 2}, "mesh": ("dp", 8)})
        {'loss': 0.10000000149011612, 'seconds': {'step': 2}, 'mesh': ['dp', 8]}
    """
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        array = np.asarray(value)
        # NumPy cannot convert bfloat16 to Python numbers directly; float32 holds it exactly.
        return (array if array.dtype.kind in "biuf" else array.astype(np.float32)).tolist()
    return str(value) if isinstance(value, Path) else value
