"""Type aliases used throughout the library.

`TrainState`, `Batch` and `Parameter` need flax and are loaded on first use, so that `import meshwright` stays fast.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import jax

PyTree: TypeAlias = Any
"""Any nesting of containers that JAX can flatten."""

PRNGKeyArray: TypeAlias = jax.Array
"""A typed key (`jax.random.key`) or a raw uint32 key (`jax.random.PRNGKey`)."""

Metrics: TypeAlias = Mapping[str, Any]
"""Values by metric name, or `(sum, count)` pairs that are averaged over minibatches and devices; may be nested."""

_NEEDS_FLAX = ("TrainState", "Batch", "Parameter")

if TYPE_CHECKING:
    from meshwright.flax_types import Batch as Batch
    from meshwright.flax_types import Parameter as Parameter
    from meshwright.flax_types import TrainState as TrainState


def __getattr__(name: str) -> Any:
    if name in _NEEDS_FLAX:
        from meshwright import flax_types

        return getattr(flax_types, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return ["PyTree", "PRNGKeyArray", "Metrics", *_NEEDS_FLAX]
