"""Where a run's numbers go besides its own files: TensorBoard, wandb, trackio. Each is imported when asked for."""

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

from meshwright.errors import MeshwrightError
from meshwright.files import write_atomically

IDENTITIES = "trackers.json"


class TensorBoard:
    """Event files for TensorBoard; after a rewind a new file, whose first entry hides the steps that come again.

    Written through tensorboardX's own file format, without its queue: that one stops a run for good on a full disk.
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
        """Steps after `step` come again; `seen` is the last of them that came before."""
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
            # A torn record ends a file for its readers: what comes next gets a new one.
            with contextlib.suppress(OSError):
                self.close()
            raise

    def _open(self) -> Any:
        if self._file is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            # Files are named after the second; two starts within one must not share a file.
            self._file = self._writers.EventsWriter(str(self.folder / "events"), f".{uuid.uuid4().hex[:8]}")
            if self._purge_step is not None:
                start = self._protos.SessionLog(status=self._protos.SessionLog.START)
                event = self._protos.Event(step=self._purge_step, wall_time=time.time(), session_log=start)
                self._file.write_event(event)
        return self._file


class OnlineRun:
    """A run at Weights & Biases, or in trackio; its identity is kept in the run's folder, so that it can be resumed."""

    def __init__(self, service: Literal["wandb", "trackio"], folder: Path, options: str | Mapping[str, Any]) -> None:
        try:
            module: Any = importlib.import_module(service)
        except ModuleNotFoundError as error:
            if error.name != service:
                raise
            raise MeshwrightError(f"{service} is not installed here.", hint=f"pip install {service}.") from None
        self.service, self.label, self._path = service, service.capitalize(), folder / IDENTITIES
        wanted = {"project": options} if isinstance(options, str) else dict(options)
        if "project" not in wanted:
            raise MeshwrightError(f"{service}= has no project.", hint=f'{service}="my-project".')
        # As few letters as wandb's own, and as unlikely to meet another run's.
        self._identity = self._read().get(service, {"id": uuid.uuid4().hex[:12], "seen": -1})
        self._write()
        name, identity = folder.resolve().name, self._identity["id"]
        if service == "wandb":
            usual = {"name": name, "dir": str(folder), "id": identity}
        else:  # trackio knows runs by their names
            usual = {"name": f"{name}-{identity}"}
        self._run = module.init(**usual | wanted, resume="allow")

    def metrics(self, step: int, values: Mapping[str, Any]) -> None:
        # Their steps only go forward; what they have seen they keep.
        if step > self._identity["seen"]:
            self._run.log(dict(numbers(values)), step=step)

    def event(self, kind: str, step: int, text: str) -> None:
        del kind, step, text  # events are told in the run's own files and its report

    def rewind(self, step: int, seen: int) -> None:
        # The larger one: a run that is killed twice may not have come as far the second time.
        self._identity["seen"] = max(seen, self._identity["seen"])
        self._write()

    def close(self) -> None:
        self._run.finish()

    def _read(self) -> dict[str, Any]:
        return dict(json.loads(self._path.read_text())) if self._path.exists() else {}

    def _write(self) -> None:
        write_atomically(self._path, json.dumps(self._read() | {self.service: self._identity}))


Tracker = TensorBoard | OnlineRun


def numbers(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yields the numbers among a step's values, nested ones by joined names; `step` and `time` are not among them.

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
    """Returns a value as JSON has it: numbers of numpy and jax as Python's, which lose nothing.

    Numbers that are not finite are written as Python writes them, `NaN` and `Infinity`, which `json.loads` reads.

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
        # numpy has no way from bfloat16 to Python's numbers but through a wider one, which holds it exactly.
        return (array if array.dtype.kind in "biuf" else array.astype(np.float32)).tolist()
    return str(value) if isinstance(value, Path) else value
