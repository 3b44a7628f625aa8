"""A job's train step compiled for a machine that need not exist, in a process of its own.

Compilers crash, hang and run out of memory. In another process, with a limit on time and on memory, each of these is a
message. What comes back is plain data: the compiler's own account of memory, and every collective of the program.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from meshwright.errors import MeshwrightError
from meshwright.layout.leaf import format_bytes
from meshwright.plan.compiled.topology import TPU_ENVIRONMENT, require_compiler
from meshwright.plan.compiled.verdict import CompiledCollective
from meshwright.plan.step_setup import Setup
from meshwright.plan.target import Target, parse_target

TIMEOUT_S = 180.0
MEMORY_LIMIT = 8 * 2**30
Reason = Literal["missing", "refused", "crash", "timeout", "memory"]


class CompileError(MeshwrightError):
    """A program could not be compiled.

    `reason`: its compiler is "missing", it "refused" the program, was killed in a "crash", or passed the limit of
    "timeout" or "memory".
    """

    def __init__(self, message: str, *, reason: Reason, hint: str | None = None) -> None:
        self.reason = reason
        super().__init__(message, hint=hint)


@dataclass(frozen=True)
class Compiled:
    """What a compiler made of a train step.

    Args:
        peak_bytes: the most memory that is in use on a device at once, by the compiler's account.
        memory: its parts: argument, output, alias (outputs in place of arguments), temp, code.
        does_not_fit: the compiler's words where the program needs more memory than the chip has; then there is no more.
        estimated_cycles: the compiler's estimate of compute (TPUs); 0 where it has none.
        peak_rss_bytes: memory that compiling took here.
    """

    target: str
    setup: Setup
    peak_bytes: int = 0
    memory: Mapping[str, int] = field(default_factory=dict)
    collectives: tuple[CompiledCollective, ...] = ()
    num_matmuls: int = 0
    estimated_cycles: int = 0
    trace_s: float = 0.0
    compile_s: float = 0.0
    peak_rss_bytes: int = 0
    versions: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    does_not_fit: str | None = None

    @property
    def wire_bytes(self) -> float:
        """Bytes each device sends in a step."""
        return sum(c.trips * c.wire_bytes for c in self.collectives)

    @property
    def hidden_share(self) -> float:
        """The share of these bytes that is sent beside compute; 1 where nothing is sent."""
        hidden = sum(c.trips * c.wire_bytes * c.hidden_share for c in self.collectives)
        return hidden / self.wire_bytes if self.wire_bytes else 1.0

    @property
    def is_judged(self) -> bool:
        """Whether the share of every transfer that is hidden was found from its chip's rates."""
        return all(c.share is not None for c in self.collectives if c.wire_bytes)

    def to_json(self) -> dict[str, Any]:
        collectives = [{**asdict(c), "state": c.state} for c in self.collectives]
        return {**asdict(self), "collectives": collectives, "setup": self.setup.to_json()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Compiled:
        collectives = tuple(
            CompiledCollective(**{**one, "axes": tuple(one["axes"])})
            for one in ({key: value for key, value in found.items() if key != "state"} for found in data["collectives"])
        )
        changed = {"setup": Setup.from_json(data["setup"]), "collectives": collectives, "notes": tuple(data["notes"])}
        return cls(**{**data, **changed})


def compile_step(
    job: Any,
    target: str | Target,
    setup: Setup,
    *,
    timeout_s: float = TIMEOUT_S,
    memory_limit: int = MEMORY_LIMIT,
    python: str | None = None,
    text_path: str | Path | None = None,
) -> Compiled:
    """Compiles a job's train step for a target, in a process of its own, or raises a `CompileError`.

    Args:
        job: a job, or a reference to one (`module:attribute`), which is needed where the job cannot be pickled.
        python: the interpreter whose compilers are used; this one's by default.
        text_path: a file for the text of the compiled program.

    Example:
        >>> from meshwright.models import Decoder
        >>> from meshwright.train import language_job
        >>> job = language_job(Decoder.named("tiny"), batch_size=8, num_tokens=16)
        >>> compile_step(job, "v5p:2x2x1", Setup(mesh="fsdp:4"), timeout_s=0)
        Traceback (most recent call last):
        meshwright.errors.MeshwrightError: a limit of 0 s leaves no time to compile in.
    """
    target = parse_target(target)
    if not timeout_s > 0:
        raise MeshwrightError(f"a limit of {timeout_s} s leaves no time to compile in.")
    if python is None:
        require_compiler(target)
    request = {
        "target": target.name,
        "setup": setup.to_json(),
        "memory_limit": memory_limit,
        "text_path": None if text_path is None else str(Path(text_path).absolute()),
        **_sent(job),
    }
    with tempfile.TemporaryDirectory(prefix="meshwright-plan-") as folder:
        asked, answered, errors = (Path(folder) / name for name in ("request.json", "result.json", "errors.txt"))
        asked.write_text(json.dumps(request))
        command = [python or sys.executable, "-m", "meshwright.plan.compiled.compile_child", str(asked), str(answered)]
        status = _run(command, errors, timeout_s)
        if status is None:
            raise CompileError(
                f"compiling {setup} for {target} took longer than {timeout_s:g} s.",
                reason="timeout",
                hint='a longer limit, or layers in a loop: Execution(layers="scan") compiles one layer.',
            )
        text = answered.read_text() if answered.exists() else ""
        said = errors.read_text(errors="replace").strip().splitlines()
    if not text:
        raise CompileError(_crash(status, target, said), reason="crash", hint="the compiler's last words are above.")
    answer = json.loads(text)
    if "error" in answer:
        raise CompileError(answer["error"], reason=answer["reason"], hint=answer.get("hint"))
    return Compiled.from_json(answer)


def _sent(job: Any) -> dict[str, Any]:
    if isinstance(job, str):
        return {"reference": job}
    try:
        return {"pickle": base64.b64encode(pickle.dumps(job)).decode()}
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise CompileError(
            f"the job cannot be sent to the process that compiles it: {error}",
            reason="refused",
            hint='give a reference to it instead: "module:attribute" or "path/to/file.py:attribute".',
        ) from None


def _run(command: list[str], errors: Path, timeout_s: float) -> int | None:
    """Returns the exit status of a command, or None where it had to be ended."""
    source = str(Path(__file__).parents[3])
    paths = [source, *filter(None, [os.environ.get("PYTHONPATH")])]
    # Nothing of this machine is used, so nothing of it is waited for.
    environment = {**TPU_ENVIRONMENT, **os.environ, "PYTHONPATH": os.pathsep.join(paths), "JAX_PLATFORMS": "cpu"}
    with errors.open("wb") as stream:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, env=environment, start_new_session=True
            )
        except OSError as error:
            raise CompileError(
                f"{command[0]!r} cannot be run: {error.strerror or error}.",
                reason="missing",
                hint="--python takes the path of an interpreter that has the machine's compiler.",
            ) from None
        try:
            return process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _crash(status: int, target: Target, said: list[str]) -> str:
    name = signal.Signals(-status).name if status < 0 else f"exit status {status}"
    words = "\n  ".join(line for line in said[-8:] if line.strip()) or "nothing"
    return f"the compiler for {target} crashed ({name}). It said:\n  {words}"


def over_limit(used: int, limit: int) -> str:
    """Returns the message of a process that used too much memory."""
    return f"compiling took {format_bytes(used)} of memory here, more than the limit of {format_bytes(limit)}."
