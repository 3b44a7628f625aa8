"""One table of colors: a part of memory, of a step or of a run has the same color and pattern on every page.

There are six colors, chosen so that people with any form of color blindness can tell them apart, on light and on dark
paper. Each comes with two patterns, which makes twelve fills. Parts of different tables may share a fill.
"""

from __future__ import annotations

from collections.abc import Sequence

NUM_TONES = 6
NUM_FILLS = 12  # colors with patterns, for bars and their legends
BLUE, ORANGE, GREEN, PURPLE, SKY, GRAY = range(NUM_TONES)
HATCHED = NUM_TONES  # added to a color for its second pattern

FILLS: dict[str, int] = {
    # Memory
    "parameters": BLUE,
    "optimizer": GREEN,
    "gradients": ORANGE,
    "gathered weights": SKY,
    "narrow weights": SKY + HATCHED,
    "activations": PURPLE,
    "ticks": PURPLE + HATCHED,
    "temporaries": GRAY,
    "gradients of a tick": ORANGE + HATCHED,
    "gradients of a minibatch": ORANGE + HATCHED,  # a plan has one of the two
    "layers of the stages": BLUE + HATCHED,
    "bookkeeping": GREEN + HATCHED,
    "rest": GRAY + HATCHED,
    # One step; "optimizer" is above
    "matmuls": BLUE,
    "memory traffic": PURPLE,
    "waits for communication": ORANGE + HATCHED,
    "hidden communication": SKY,
    "exposed communication": ORANGE,
    "pipeline bubble": GRAY,
    "between steps": GRAY + HATCHED,
    # A run
    "step": BLUE,
    "compute": BLUE,
    "data": ORANGE,
    "input wait": ORANGE,
    "checkpoint": GREEN,
    "save": GREEN,
    "eval": PURPLE,
    "evaluation": PURPLE,
    "compile": SKY,
    "other": GRAY,
    "recomputed": BLUE + HATCHED,
    "startup": GRAY + HATCHED,
    "restart": ORANGE + HATCHED,
    "idle": GRAY,
    # Mesh axes
    "fsdp": BLUE,
    "tp": ORANGE,
    "dp": GREEN,
    "pp": PURPLE,
    "ep": SKY,
    "cp": GRAY,
    # Passes of a pipeline
    "forward": BLUE,
    "backward": ORANGE,
    # Layers of a model, and the activations that each of them saves
    "attention": PURPLE,
    "mlp": ORANGE,
    "feed-forward": ORANGE,
    "embedding": GREEN,
    "norm": SKY,
    "norms": SKY,
    "head": BLUE,
    "loss": BLUE,
    "residual stream": GRAY,
    "other parts": GRAY + HATCHED,
}


def fills_of(names: Sequence[str]) -> list[int]:
    """Returns the fill of each part: from the table, or one that no other part of the chart has.

    >>> fills_of(["activations", "a", "b"])
    [3, 0, 1]
    """
    taken = {FILLS[name] for name in names if name in FILLS}
    free = [fill for fill in range(NUM_FILLS) if fill not in taken]
    found: list[int] = []
    for place, name in enumerate(names):
        known = FILLS.get(name)
        if known is None or known in found:
            known = free.pop(0) if free else place % NUM_FILLS
        found.append(known)
    return found
