"""Compile times of a run, cold or from JAX's persistent cache, and the reason why a step compiled twice."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.monitoring

from meshwright.tree import flatten_tree

_PHASES = ("jaxpr_trace_duration", "jaxpr_to_mlir_module_duration", "backend_compile_duration")


@dataclass(frozen=True)
class CompileTotals:
    """Compilations of this thread so far.

    Args:
        seconds: time spent tracing, lowering and compiling.
        count: number of programs.
        hits: number of programs that the persistent cache held.
        saved: seconds that the cache saved.
    """

    seconds: float = 0.0
    count: int = 0
    hits: int = 0
    saved: float = 0.0


class CompileClock:
    """Adds up the compilations that JAX reports for one thread; use `compile_clock()`.

    Inner functions are traced while outer ones are, so that their intervals nest; each moment counts once.
    """

    def __init__(self, *, now: Callable[[], float] = time.perf_counter) -> None:
        self._now, self._thread = now, threading.get_ident()
        self._seconds, self._count, self._hits, self._saved = 0.0, 0, 0, 0.0
        self._intervals: list[tuple[float, float]] = []

    def totals(self) -> CompileTotals:
        return CompileTotals(self._seconds, self._count, self._hits, self._saved)

    def on_duration(self, event: str, duration_secs: float, **_: Any) -> None:
        """Takes an event that ends now."""
        if threading.get_ident() != self._thread:
            return
        if event.endswith("/compile_time_saved_sec"):
            self._saved += max(0.0, duration_secs)
        elif event.startswith("/jax/core/compile/") and event.endswith(_PHASES):
            self._count += event.endswith(_PHASES[-1])
            end = self._now()
            start = end - duration_secs
            while self._intervals and self._intervals[-1][1] > start:  # inside this one
                inner_start, inner_end = self._intervals.pop()
                self._seconds -= inner_end - inner_start
                start = min(start, inner_start)
            self._intervals = [*self._intervals[-8:], (start, end)]
            self._seconds += end - start

    def on_event(self, event: str, **_: Any) -> None:
        if threading.get_ident() == self._thread:
            self._hits += event == "/jax/compilation_cache/cache_hits"


_clocks = threading.local()


def compile_clock() -> CompileClock:
    """Returns the clock of this thread, which counts from the first call on."""
    if not hasattr(_clocks, "clock"):
        clock = _clocks.clock = CompileClock()
        jax.monitoring.register_event_duration_secs_listener(clock.on_duration)
        jax.monitoring.register_event_listener(clock.on_event)
    found: CompileClock = _clocks.clock
    return found


class StepCompiles:
    """Reports how long a step compiled, and warns with the cause if it compiles again.

    Args:
        tell: function of an event's kind, step, text and facts.

    Example:
        >>> compiles = StepCompiles(lambda kind, number, text, **facts: print(f"{kind} at step {number}: {text[:38]}"))
        >>> double = jax.jit(lambda state, batch: (state, 2 * batch))
        >>> for number, rows in enumerate((2, 2, 4), start=1):
        ...     with compiles.watched(0.0, jax.numpy.ones(rows), number):
        ...         _ = double(0.0, jax.numpy.ones(rows))
        compile at step 1: compiled the step in ...
        recompile at step 3: warning: the step compiled again in ...
    """

    def __init__(self, tell: Callable[..., None]) -> None:
        self._tell, self._clock = tell, compile_clock()
        self._seen: dict[str, str] | None = None

    @contextlib.contextmanager
    def watched(self, state: Any, batch: Any, number: int) -> Iterator[None]:
        """Reports the compilations of `step(state, batch)`, which runs inside."""
        before = self._clock.totals()
        yield
        now = self._clock.totals()
        if now.count > before.count:
            # Donated arrays are deleted by now, but still know their shape, dtype and sharding.
            self._report(number, before, now, _describe(state, batch))

    def _report(self, number: int, before: CompileTotals, now: CompileTotals, arguments: dict[str, str]) -> None:
        seconds, hits, saved = now.seconds - before.seconds, now.hits - before.hits, now.saved - before.saved
        facts = {"seconds_compiling": round(seconds, 3), "cached": hits > 0, "seconds_saved": round(saved, 3)}
        first, self._seen = self._seen is None, arguments if self._seen is None else self._seen
        if first:
            how = f" (warm: the compile cache saved {saved:.1f} s)" if hits else ""
            self._tell("compile", number, f"compiled the step in {seconds:.1f} s{how}", **facts)
            return
        changes = explain_changes(self._seen, arguments)
        self._seen = arguments
        if changes or seconds > 1.0:  # without a change, a small program inside the step may have compiled
            cause = "; ".join(changes[:3]) + (f"; and {len(changes) - 3} more" if len(changes) > 3 else "")
            cause = cause or "its arguments look the same"
            text = f"warning: the step compiled again in {seconds:.1f} s, because {cause}"
            self._tell("recompile", number, text, changes=changes[:100], **facts)


def explain_changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Returns a line for each argument that differs.

    Example:
        >>> explain_changes({"batch/x": "float32[8,4]", "state/w": "float32[4]"}, {"batch/x": "float32[16,4]"})
        ['batch/x changed from float32[8,4] to float32[16,4]', 'state/w is gone']
    """
    changed = [
        f"{name} changed from {before[name]} to {text}" if name in before else f"{name} is new ({text})"
        for name, text in now.items()
        if before.get(name) != text
    ]
    return [*changed, *(f"{name} is gone" for name in before if name not in now)]


def _describe(state: Any, batch: Any) -> dict[str, str]:
    """Returns the shape, dtype and sharding of each argument, by its name."""
    found = {}
    for part, tree in (("state", state), ("batch", batch)):
        leaves = flatten_tree(tree, sep="/") if not hasattr(tree, "shape") else {"": tree}
        for name, leaf in leaves.items():
            found[f"{part}/{name}".rstrip("/")] = _text(leaf)
    return found


def _text(leaf: Any) -> str:
    sharding = getattr(leaf, "sharding", None)
    spec = getattr(sharding, "spec", None)
    where = "" if sharding is None else f" on {spec}" if spec is not None else f" on {sharding}"
    shape, dtype = getattr(leaf, "shape", ()), getattr(leaf, "dtype", type(leaf).__name__)
    weak = " (weak type)" if getattr(leaf, "weak_type", False) else ""
    return f"{dtype}[{','.join(map(str, shape))}]{where}{weak}"
