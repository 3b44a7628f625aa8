"""How many of a layer's transfers along tp are rings, counted by hand from `parallel.overlap.forms`."""

from types import SimpleNamespace

import pytest

from meshwright.parallel.overlap.forms import GPU_PARTS, Form
from meshwright.plan.costs.tensor_rings import share_in_rings


def profile_of(*, platform="gpu", learns=True, d_ff=5632, heads=16, kv_heads=4):
    # Attention gathers rows for (16 + 2 * 4) * 128 = 3072 features, and sums over 2048; the other block 11264 and 5632.
    return SimpleNamespace(
        platform=platform, learns_layers=learns, d_ff=d_ff, heads=heads, kv_heads=kv_heads, head_dim=128
    )


@pytest.mark.parametrize(
    ("tp", "kind", "count", "regathers", "rings"),
    [
        # Narrow: two gathers forward and two for gradients of scatters are rings; two for weight gradients are whole.
        (4, "all-gather", 6, True, 4),
        (4, "all-gather", 4, False, 4),  # rows are saved
        (4, "all-gather", 6, False, 6),  # recomputed layers gather as the forward pass does
        # The gradients of the two gathers scatter whole.
        (4, "reduce-scatter", 4, True, 2),
        (4, "reduce-scatter", 5, False, 3),
        (2, "reduce-scatter", 4, True, 2),
    ],
)
def test_rings_on_gpus_by_hand(tp, kind, count, regathers, rings):
    assert share_in_rings(profile_of(), kind, count, tp, regathers=regathers) == rings / count


def test_wide_products_over_many_devices_are_whole_collectives():
    # With 4 * 5632 hidden features, devices gather for 5632 of them and sum over 2816; attention is narrow.
    wide = profile_of(d_ff=4 * 5632)
    assert share_in_rings(wide, "all-gather", 6, 8, regathers=True) == (2 + 1) / 6
    assert share_in_rings(wide, "reduce-scatter", 4, 8, regathers=True) == 1 / 4
    least = {operation: min((size, width) for size, width, _ in rows) for operation, rows in GPU_PARTS.items()}
    assert least == {"gather_matmul": (8, 1728), "matmul_scatter": (4, 1728)}
    assert all(isinstance(form, Form) and not form.ring for rows in GPU_PARTS.values() for *_, form in rows)


def test_tpus_and_frozen_layers():
    assert share_in_rings(profile_of(platform="tpu"), "all-gather", 6, 8, regathers=True) == 1.0
    # Without gradients, only the two gathers and scatters of the forward pass are left.
    frozen = profile_of(learns=False)
    assert share_in_rings(frozen, "all-gather", 2, 4, regathers=True) == 1.0
    assert share_in_rings(frozen, "reduce-scatter", 2, 4, regathers=True) == 1.0
