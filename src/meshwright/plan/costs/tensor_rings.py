"""How many of a layer's transfers along the tensor axis are rings of permutes, and how many whole collectives."""

from __future__ import annotations

from meshwright.parallel.overlap.forms import GPU_PARTS
from meshwright.plan.costs.job_costs import JobCosts


def share_in_rings(profile: JobCosts, kind: str, count: int, tp: int, *, regathers: bool) -> float:
    """Returns the share of a layer's gathers or scatters along tp that are rings; the others are whole collectives.

    On GPUs, the gradients of gathers use whole collectives, and so do wide products over many devices, in parts
    (`parallel.overlap.forms`).

    Args:
        regathers: whether weight gradients gather the rows again.
    """
    if profile.platform != "gpu":
        return 1.0
    heads, kv_heads, d_ff = profile.heads or 0, profile.kv_heads or profile.heads or 0, profile.d_ff or 0
    dim = profile.head_dim or 0
    # Of the gathers, two are those of a scatter's gradient; of the scatters, two are the gradients of gathers.
    if kind == "all-gather":
        widths = ((heads + 2 * kv_heads) * dim, 2 * d_ff)
        forward, rings = count - 2 - 2 * regathers, 2
    else:
        widths, forward, rings = (heads * dim, d_ff), count - 2, 0
    if not profile.learns_layers:
        forward, rings = count, 0
    known = GPU_PARTS["gather_matmul" if kind == "all-gather" else "matmul_scatter"]
    cut = sum(any(tp >= size and width / tp >= least for size, least, _ in known) for width in widths)
    return (rings + forward * (1 - cut / len(widths))) / count
