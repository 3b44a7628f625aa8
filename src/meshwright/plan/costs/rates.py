"""The rate at which matmuls are taken to run on a chip."""

from __future__ import annotations

from meshwright.hardware.chips import Chip

# The share of what is printed that large matmuls hold: 682 of 989 TFLOP/s on one H200 (benchmarks/RESULTS.md). Other
# chips are assumed to reach the same.
MATMUL_SHARE = 0.69


def matmul_rate(chip: Chip, dtype: str) -> float | None:
    """Returns the FLOP/s of large matmuls: as measured, or a share of the peak; None where the table has no peak.

    Example:
        >>> from meshwright.hardware.chips import chip_of
        >>> matmul_rate(chip_of("v5p"), "bfloat16") / chip_of("v5p").peak()
        0.69
    """
    if chip.matmul_flops is not None and dtype == "bfloat16":
        return chip.matmul_flops
    peak = chip.peak(dtype)
    return None if peak is None else peak * MATMUL_SHARE
