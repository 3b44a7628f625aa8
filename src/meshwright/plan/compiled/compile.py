"""Compilation of a job's train step in a separate process, for hardware you may not have.

Compilers can crash, hang or run out of memory; a separate process with a time and memory limit turns each of these
into an error. The result is plain data: the compiler's memory analysis and every collective of the program.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from meshwright.errors import MeshwrightError
from meshwright.hardware.libtpu import TPU_ENVIRONMENT
from meshwright.interrupts import at_end
from meshwright.plan.compiled.busy_clock import wait_busy
from meshwright.plan.compiled.fp8_matmuls import MatmulUse
from meshwright.plan.compiled.scheduled_steps import Steps, steps_from_json, steps_to_json
from meshwright.plan.compiled.topology import require_compiler
from meshwright.plan.compiled.verdict import CompiledCollective
from meshwright.plan.step_setup import Setup
from meshwright.plan.target import Target, parse_target

TIMEOUT_S = 180.0
MEMORY_LIMIT = 8 * 2**30
PARENT = "MESHWRIGHT_PLAN_PARENT"
"""Variable that tells the compiling process who waits for it."""
WIDENED = (
    "XLA's CPU compiler sends 16-bit values as float32, so gathers and activations have up to twice the bytes that "
    "they have on TPUs and GPUs"
)
"""Note of programs with 16-bit values that were compiled for simulated devices."""
Reason = Literal["missing", "refused", "crash", "timeout", "memory"]


class CompileError(MeshwrightError):
    """A program could not be compiled.

    `reason`: the compiler is "missing", "refused" the program, had a "crash", or exceeded its limit: "timeout" or
    "memory".
    """

    def __init__(self, message: str, *, reason: Reason, hint: str | None = None) -> None:
        self.reason = reason
        super().__init__(message, hint=hint)


@dataclass(frozen=True)
class Compiled:
    """A compiled train step.

    Args:
        peak_bytes: peak memory per device, from the compiler's memory analysis.
        memory: its parts: argument, output, alias (outputs that reuse arguments), temp, generated_code.
        matmuls: the matmuls by parameter, with the dtypes in which they run.
        estimated_cycles: the compiler's estimate of compute cycles (TPUs), or 0.
        trace_s, compile_s: seconds of tracing and compiling.
        peak_rss_bytes: host memory used to compile.
        steps: the schedule of the program, timed if the chip is known.
        does_not_fit: the compiler's error if the program exceeds the chip's memory; other figures are then missing.
    """

    target: str
    setup: Setup
    peak_bytes: int = 0
    memory: Mapping[str, int] = field(default_factory=dict)
    collectives: tuple[CompiledCollective, ...] = ()
    num_matmuls: int = 0
    matmuls: tuple[MatmulUse, ...] = ()
    estimated_cycles: int = 0
    trace_s: float = 0.0
    compile_s: float = 0.0
    peak_rss_bytes: int = 0
    versions: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    does_not_fit: str | None = None
    steps: Steps = ()

    @property
    def wire_bytes(self) -> float:
        """Bytes that each device sends per step."""
        return sum(c.trips * c.wire_bytes for c in self.collectives)

    @property
    def hidden_share(self) -> float:
        """Share of these bytes that overlaps with compute; 1 if nothing is sent."""
        hidden = sum(c.trips * c.wire_bytes * c.hidden_share for c in self.collectives)
        return hidden / self.wire_bytes if self.wire_bytes else 1.0

    @property
    def is_judged(self) -> bool:
        """Whether the hidden share of every transfer was judged with the chip's rates."""
        return all(c.share is not None for c in self.collectives if c.wire_bytes)

    def to_json(self) -> dict[str, Any]:
        collectives = [{**asdict(c), "state": c.state} for c in self.collectives]
        shown = {"collectives": collectives, "setup": self.setup.to_json(), "steps": steps_to_json(self.steps)}
        return {**asdict(replace(self, steps=())), **shown}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Compiled:
        collectives = tuple(
            CompiledCollective(**{**one, "axes": tuple(one["axes"])})
            for one in ({key: value for key, value in found.items() if key != "state"} for found in data["collectives"])
        )
        changed = {"setup": Setup.from_json(data["setup"]), "collectives": collectives, "notes": tuple(data["notes"])}
        changed["matmuls"] = tuple(
            MatmulUse(**{**one, "dtypes": tuple(one["dtypes"])}) for one in data.get("matmuls", ())
        )
        changed["steps"] = steps_from_json(data.get("steps", ()))
        return cls(**{**data, **changed})


class AdaptedReference(NamedTuple):
    """A reference to a job (`module:attribute`), and the text of the adapters that it trains."""

    reference: str
    lora: str


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
    """Compiles a job's train step for a target in a separate process, or raises a `CompileError`.

    Args:
        job: a job, or a reference to one (`module:attribute`, or an `AdaptedReference`), which also works if the job
            cannot be pickled.
        timeout_s: time limit in seconds; time in which other programs use the cores does not count (Linux).
        memory_limit: limit on the compiling process's memory, in bytes.
        python: interpreter whose compilers to use (default: this one).
        text_path: file to write the text of the compiled program to.

    Example:
        >>> from meshwright.models import Decoder
        >>> from meshwright.train import language_job
        >>> job = language_job(Decoder.named("tiny"), batch_size=8, num_tokens=16)
        >>> compile_step(job, "v5p:2x2x1", Setup(mesh="fsdp:4"), timeout_s=0)
        Traceback (most recent call last):
        meshwright.errors.MeshwrightError: timeout_s must be greater than 0; got 0.
    """
    target = parse_target(target)
    if not timeout_s > 0:
        raise MeshwrightError(f"timeout_s must be greater than 0; got {timeout_s}.")
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
                hint='raise the limit, or compile layers as a loop: Execution(layers="scan").',
            )
        text = answered.read_text() if answered.exists() else ""
        said = errors.read_text(errors="replace").strip().splitlines()
    if not text:
        raise CompileError(_crash(status, target, said), reason="crash", hint="check the compiler's output above.")
    answer = json.loads(text)
    if "error" in answer:
        raise CompileError(answer["error"], reason=answer["reason"], hint=answer.get("hint"))
    return Compiled.from_json(answer)


def _sent(job: Any) -> dict[str, Any]:
    if isinstance(job, AdaptedReference):
        return {"reference": job.reference, "lora": job.lora}
    if isinstance(job, str):
        return {"reference": job}
    try:
        return {"pickle": base64.b64encode(pickle.dumps(job)).decode()}
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise CompileError(
            f"cannot pickle the job for the compiling process: {error}",
            reason="refused",
            hint='pass a reference to the job instead: "module:attribute" or "path/to/file.py:attribute".',
        ) from None


def _run(command: list[str], errors: Path, timeout_s: float) -> int | None:
    """Returns the exit status of a command, or None if it timed out."""
    source = str(Path(__file__).parents[3])
    paths = [source, *filter(None, [os.environ.get("PYTHONPATH")])]
    # JAX_PLATFORMS=cpu keeps JAX from waiting for local accelerators, which compiling does not use.
    environment = {**TPU_ENVIRONMENT, **os.environ, "PYTHONPATH": os.pathsep.join(paths), "JAX_PLATFORMS": "cpu"}
    environment[PARENT] = str(os.getpid())
    with errors.open("wb") as stream:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, env=environment, start_new_session=True
            )
        except OSError as error:
            raise CompileError(
                f"cannot run {command[0]!r}: {error.strerror or error}.",
                reason="missing",
                hint="pass the path of a Python interpreter with the target's compiler installed.",
            ) from None

        def kill() -> None:
            os.killpg(process.pid, signal.SIGKILL)
            shutil.rmtree(errors.parent, ignore_errors=True)

        try:
            with at_end(kill):
                return wait_busy(process, timeout_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _crash(status: int, target: Target, said: list[str]) -> str:
    name = signal.Signals(-status).name if status < 0 else f"exit status {status}"
    words = "\n  ".join(line for line in said[-8:] if line.strip()) or "(none)"
    return f"the compiler for {target} crashed ({name}). Its last output:\n  {words}"
