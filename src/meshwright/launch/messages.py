"""What the supervisor tells the user: who failed, why, which step is safe, and what happens next."""

from __future__ import annotations

import signal

from meshwright.launch.events import EXIT_HUNG, EXIT_LOST_PEER, Ending, Silent

_SIGNALS = {
    signal.SIGABRT: "aborted",
    signal.SIGBUS: "crashed; SIGBUS often means a full /dev/shm or a truncated file",
    signal.SIGFPE: "crashed",
    signal.SIGILL: "crashed; the program needs another processor",
    signal.SIGSEGV: "crashed",
}


def describe_ending(ending: Ending) -> str:
    """Returns the reason for a rank's end, as the predicate of a sentence about it.

    Example:
        >>> describe_ending(Ending(signal=9))
        'was killed (SIGKILL)'
        >>> describe_ending(Ending(code=1))
        'failed with exit code 1'
    """
    if ending.out_of_memory:
        return "ran out of memory: the kernel's out-of-memory killer ended it (SIGKILL)"
    if ending.signal is not None:
        try:
            name = signal.Signals(ending.signal).name
        except ValueError:
            name = f"signal {ending.signal}"
        text = (
            f"{_SIGNALS.get(signal.Signals(ending.signal), 'was killed') if name[0] == 'S' else 'was killed'} ({name})"
        )
    elif ending.code == EXIT_HUNG:
        text = f"hung and ended itself (exit code {EXIT_HUNG})"
    elif ending.code == EXIT_LOST_PEER:
        text = "lost contact with another rank"
    elif "RESOURCE_EXHAUSTED" in ending.message:
        text = f"ran out of device memory (exit code {ending.code})"
    elif ending.code is None:
        text = "could not be reached"
    else:
        text = f"failed with exit code {ending.code}"
    return text


def describe_silence(event: Silent) -> str:
    """Returns the reason for stopping ranks without a heartbeat.

    Example:
        >>> describe_silence(Silent((3,), 31.5))
        'has given no sign of life for 32 s (its process is stopped, or its host cannot be reached)'
    """
    have, its = ("have", "their processes are stopped, or their hosts") if len(event.ranks) > 1 else (
        "has",
        "its process is stopped, or its host",
    )  # fmt: skip
    return f"{have} given no sign of life for {event.seconds:.0f} s ({its} cannot be reached)"


def name_ranks(ranks: tuple[int, ...], hosts: tuple[str, ...]) -> str:
    """Returns ranks with their hosts, at most four of them.

    Example:
        >>> name_ranks((1,), ("node7",)), name_ranks((1, 2), ("node7", "node8"))
        ('rank 1 on node7', 'ranks 1 (node7), 2 (node8)')
        >>> name_ranks(tuple(range(6)), ("a",) * 6)
        'ranks 0 (a), 1 (a), 2 (a), 3 (a) and 2 more'
    """
    if len(ranks) == 1:
        return f"rank {ranks[0]} on {hosts[0]}"
    shown = ", ".join(f"{rank} ({host})" for rank, host in zip(ranks[:4], hosts[:4], strict=True))
    return f"ranks {shown}" + (f" and {len(ranks) - 4} more" if len(ranks) > 4 else "")


def describe_safety(verified: int | None, reached: int | None, snapshot: int | None = None) -> str:
    """Returns which step is safe, and which steps have to be computed again.

    Args:
        snapshot: step of the newest snapshot in host memory.

    Example:
        >>> describe_safety(40, 57)
        'Step 40 is the newest verified checkpoint; steps 41 to 57 are computed again.'
        >>> describe_safety(None, 7)
        'No checkpoint is finished yet, so the run starts again from the beginning.'
        >>> describe_safety(40, 57, 55)
        'Step 40 is the newest verified checkpoint, step 55 is in host memory; steps 56 to 57 are computed again.'
    """
    if verified is None and snapshot is None:
        return "No checkpoint is finished yet, so the run starts again from the beginning."
    first = (
        "No checkpoint is finished yet" if verified is None else f"Step {verified} is the newest verified checkpoint"
    )
    safe = -1 if verified is None else verified
    text = first
    if snapshot is not None and snapshot > safe:
        text, safe = f"{first}, step {snapshot} is in host memory", snapshot
    if reached is None or reached <= safe:
        return f"{text}; no step is lost."
    lost = f"step {reached} is" if reached == safe + 1 else f"steps {safe + 1} to {reached} are"
    return f"{text}; {lost} computed again."


def shorten(text: str, limit: int = 200) -> str:
    """Returns a text on one line, cut at the end.

    Example:
        >>> shorten("a  b", 10), shorten("abcdefgh", 6)
        ('a b', 'abc...')
    """
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 3] + "..."


def rough_duration(seconds: float) -> str:
    """Returns a duration in words.

    Example:
        >>> rough_duration(0.5), rough_duration(90), rough_duration(7200)
        ('0.5 s', '90 s', '2 h')
    """
    if seconds >= 7200:
        return f"{seconds / 3600:.3g} h"
    return f"{seconds:.3g} s"


def plural(count: int, noun: str) -> str:
    """Returns a number with its noun.

    Example:
        >>> plural(1, "rank"), plural(2, "rank")
        ('1 rank', '2 ranks')
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
