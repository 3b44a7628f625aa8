"""Number formatting and axis ticks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

Show = Callable[[float], str]


def number(value: float) -> str:
    """Returns a number with four significant digits.

    >>> number(2.10449), number(12345.6), number(3e-4), number(0.0), number(float("nan"))
    ('2.104', '12,346', '0.0003', '0', 'nan')
    """
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if size >= 1e15 or 0 < size < 1e-4:
        return f"{value:.3g}"
    if size >= 1000:
        return f"{value:,.0f}"
    digits = 3 - math.floor(math.log10(size)) if size > 0 else 0
    shown = f"{value:.{digits}f}"
    return shown.rstrip("0").rstrip(".") if "." in shown else shown


def compact(value: float) -> str:
    """Returns a number with a k, M, B or T suffix.

    >>> compact(41_237), compact(4.9e6), compact(950), compact(2.6e9)
    ('41.2k', '4.9M', '950', '2.6B')
    """
    if not math.isfinite(value):
        return str(value)
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size * 0.99995:
            return f"{value / size:.1f}".removesuffix(".0") + unit
    return number(value)


def percent(share: float) -> str:
    """Returns a share as a percentage.

    >>> percent(0.3817), percent(0.0004), percent(1)
    ('38.2%', '0.04%', '100%')
    """
    value = 100 * share
    if 0 < value < 0.005:
        return "under 0.01%"
    digits = 0 if value >= 99.95 or value == 0 else 1 if value >= 0.1 else 2
    return f"{value:.{digits}f}%"


def duration(seconds: float) -> str:
    """Returns a duration with units.

    >>> [duration(seconds) for seconds in (0.00031, 0.42, 7.25, 123, 3900, 200_000)]
    ['0.31 ms', '420 ms', '7.25 s', '2 min 3 s', '1 h 5 min', '2 d 7 h']
    """
    if not math.isfinite(seconds):
        return str(seconds)
    if seconds == 0:
        return "0 s"
    if seconds < 0.9995:
        return f"{number(float(f'{1e3 * seconds:.3g}'))} ms"
    if seconds < 59.95:
        return f"{number(float(f'{seconds:.3g}'))} s"
    whole = round(seconds)
    for size, unit, part, part_unit in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            rest = whole % size // part
            return f"{whole // size} {unit}" + (f" {rest} {part_unit}" if rest else "")
    return f"{whole} s"


def plural(count: int, word: str) -> str:
    """Returns a count with its noun.

    >>> plural(1, "row"), plural(4096, "row"), plural(2, "minibatch")
    ('1 row', '4,096 rows', '2 minibatches')
    """
    ending = "" if count == 1 else "es" if word.endswith("ch") else "s"
    return f"{count:,} {word}{ending}"


def ticks(low: float, high: float, *, count: int = 5) -> list[float]:
    """Returns about `count` round numbers between `low` and `high`.

    >>> ticks(0, 1), ticks(3, 297)
    ([0.0, 0.2, 0.4, 0.6, 0.8, 1.0], [50.0, 100.0, 150.0, 200.0, 250.0])
    """
    if not high > low:
        return [low]
    step = _round_step((high - low) / count)
    first = math.ceil(low / step - 1e-9)
    found: list[float] = []
    while (first + len(found)) * step <= high + 1e-9 * step:
        # Multiply instead of adding, so that rounding errors do not accumulate.
        found.append(round((first + len(found)) * step, max(0, 2 - math.floor(math.log10(step)))))
    return found


def whole_ticks(low: float, high: float, *, count: int = 8) -> list[float]:
    """Returns only the integer `ticks`, for axes that count steps.

    >>> whole_ticks(0.5, 3.5)
    [1.0, 2.0, 3.0]
    """
    return [place for place in ticks(low, high, count=count) if place == int(place)]


def _round_step(wanted: float) -> float:
    power = 10.0 ** math.floor(math.log10(wanted))
    return min((power * factor for factor in (1, 2, 2.5, 5, 10)), key=lambda step: abs(math.log(step / wanted)))


def log_ticks(low: float, high: float) -> list[float]:
    """Returns powers of ten between two positive numbers, with 2 and 5 in between if there are few.

    >>> log_ticks(0.8, 120), log_ticks(1, 6)
    ([1.0, 10.0, 100.0], [1.0, 2.0, 5.0])
    """
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found = [10.0**power for power in powers if low * 0.999 <= 10.0**power <= high * 1.001]
    if len(found) < 3:
        found = [f * 10.0**p for p in powers for f in (1, 2, 5) if low * 0.999 <= f * 10.0**p <= high * 1.001]
    if len(found) < 2:
        return ticks(low, high, count=4)
    return found[:: math.ceil(len(found) / 7)]


def time_ticks(seconds: float, *, count: int = 6) -> list[float]:
    """Returns round times from 0 to `seconds`.

    >>> time_ticks(150), time_ticks(0.03)
    ([0, 30, 60, 90, 120, 150], [0.0, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03])
    """
    if seconds < 20:
        return ticks(0, seconds, count=count)
    step = _time_step(seconds / count)
    return [step * i for i in range(int(seconds // step) + 1)]


def _time_step(wanted: float) -> int:
    """Returns the next larger round number of seconds, minutes, hours or days."""
    steps = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400]
    step = next((step for step in steps if step >= wanted), None)
    return 86400 * max(1, round(_round_step(wanted / 86400))) if step is None else step


def time_levels(low: float, high: float, *, log: bool = False, count: int = 5) -> list[float]:
    """Returns round times between two times, in seconds, for an axis that need not start at 0.

    >>> [duration(level) for level in time_levels(0, 9000)]
    ['0 s', '30 min', '1 h', '1 h 30 min', '2 h', '2 h 30 min']
    >>> [duration(level) for level in time_levels(40, 9000, log=True)]
    ['1 min', '10 min', '1 h']
    """
    if high < 20 or not high > low:
        return log_ticks(low, high) if log else ticks(low, high, count=count)
    if log:
        powers = [10.0**power for power in range(math.floor(math.log10(low)), 1)]
        tens = [*powers, 10, 60, 600, 3600, 36000, *(86400.0 * 10**power for power in range(12))]
        halves = [factor * power for power in powers for factor in (2, 5)]
        halves += [20, 30, 120, 300, 1200, 1800, 7200, 18000, 43200, *(factor * 86400.0 for factor in (2, 5, 20, 50))]
        for known in (tens, sorted([*tens, *halves])):
            found = [level for level in known if low * 0.999 <= level <= high * 1.001]
            if len(found) > 2:
                return found[:: math.ceil(len(found) / 7)]
    step = _time_step((high - low) / count)
    return [float(step * place) for place in range(math.ceil(low / step), math.floor(high / step) + 1)]


def finite_range(values: Sequence[float]) -> tuple[float, float] | None:
    """Returns the smallest and largest finite value, or None if there is none."""
    finite = [value for value in values if math.isfinite(value)]
    return (min(finite), max(finite)) if finite else None
