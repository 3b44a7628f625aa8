"""Differences that a batch cannot show, because its rows are all equal or gradients are zero on one device."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.errors import MeshwrightError
from meshwright.types import PyTree
from meshwright.verify.compare import Named

SHOWN = 3


def require_gradients(grads: Named) -> None:
    """Raises if every gradient on one device is zero: then any step is equal to any other.

    Example:
        >>> require_gradients({"w": np.zeros(2)})
        Traceback (most recent call last):
        ...
        meshwright.errors.MeshwrightError: every gradient is zero on one device, so an equal step would show nothing.
        hint: pass a batch whose loss depends on the parameters, or its shapes, for which verify draws random values.
    """
    if grads and not any(np.any(leaf) for leaf in grads.values()):
        raise MeshwrightError(
            "every gradient is zero on one device, so an equal step would show nothing.",
            hint="pass a batch whose loss depends on the parameters, or its shapes, for which verify draws random "
            "values.",
        )


def blind_spots(batch: PyTree, grads: Named, changes: Named) -> tuple[str, ...]:
    """Returns a note for each kind of difference that a comparison on this batch cannot show.

    Args:
        batch: the batch of the comparison.
        grads: the gradients on one device, without frozen parameters.
        changes: the changes of the parameters over all steps, on one device.

    Example:
        >>> batch = {"x": np.ones((4, 2))}
        >>> grads = {"w": np.ones(2), "b": np.zeros(2)}
        >>> for note in blind_spots(batch, grads, grads):
        ...     print(note)
        the gradient of 1 of 2 parameters is zero on this batch (`b`), so an error in it does not show.
        all 4 rows of the batch are equal, so rows in the wrong place do not show.
    """
    notes = []
    unmoved = [name for name in grads if not np.any(grads[name]) and not np.any(changes[name])]
    if unmoved:
        names = ", ".join(f"`{name}`" for name in unmoved[:SHOWN]) + ", ..." * (len(unmoved) > SHOWN)
        notes.append(
            f"the gradient of {len(unmoved)} of {len(grads)} parameters is zero on this batch ({names}), so an error "
            "in it does not show."
        )
    rows = [np.asarray(leaf) for leaf in jax.tree.leaves(batch) if np.ndim(leaf) and not _is_key(leaf)]
    if rows and len(rows[0]) > 1 and all(np.array_equal(leaf, np.broadcast_to(leaf[:1], leaf.shape)) for leaf in rows):
        notes.append(f"all {len(rows[0])} rows of the batch are equal, so rows in the wrong place do not show.")
    return tuple(notes)


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(getattr(leaf, "dtype", np.float32), jax.dtypes.prng_key)
