"""Drawing a token from logits: greedy, or at a temperature, from the most likely tokens only."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.errors import MeshwrightError

Mode = Literal["greedy", "plain", "filtered"]
_KEY = "threefry2x32"  # the same numbers on every backend and mesh


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    Args:
        temperature: divides the logits; 0 always takes the most likely token.
        top_k: draw only from this many of the most likely tokens (default: all).
        top_p: draw only from the most likely tokens whose probabilities, after `temperature` and `top_k`, first reach
            this sum (default: all).
        seed: each row and place of a batch has its own random numbers, which depend on nothing else.

    Example:
        >>> Sampling(temperature=0.7, top_p=0.9).mode, Sampling().mode
        ('filtered', 'greedy')
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise MeshwrightError(
                f"temperature={self.temperature} is out of range.", hint="use a finite number of at least 0."
            )
        if self.top_k is not None and (type(self.top_k) is not int or self.top_k < 1):
            raise MeshwrightError(f"top_k must be at least 1; got {self.top_k}.", hint="leave it out for all tokens.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise MeshwrightError(f"top_p must be above 0 and up to 1; got {self.top_p}.", hint="use e.g. 0.9.")
        if self.temperature == 0 and (self.top_k or self.top_p):
            raise MeshwrightError(
                "top_k and top_p have no effect at temperature 0, which takes the most likely token.",
                hint="set a temperature, e.g. 0.8.",
            )
        if not 0 <= self.seed < 2**63:
            raise MeshwrightError(f"seed={self.seed} is out of range.", hint="use 0 or a positive number.")

    @property
    def mode(self) -> Mode:
        """The program that draws: programs do not depend on other values."""
        if self.temperature == 0:
            return "greedy"
        return "plain" if self.top_k is None and self.top_p is None else "filtered"

    def values(self, vocab_size: int) -> dict[str, Any]:
        """Returns the values that `draw` takes."""
        # NumPy arrays are the same on all processes; JAX arrays would belong to one.
        return {
            "key": np.asarray(jax.random.key_data(jax.random.key(self.seed, impl=_KEY))),
            "temperature": np.float32(self.temperature),
            "top_k": np.int32(min(self.top_k or vocab_size, vocab_size)),
            "top_p": np.float32(1.0 if self.top_p is None else self.top_p),
        }


def draw(logits: Any, places: Any, mode: Mode, values: dict[str, Any]) -> Any:
    """Returns a token for each row of `[B, V]` logits.

    Args:
        places: `[B]`, the place of the new token in its row.
        values: from `Sampling.values`.
    """
    if mode == "greedy":
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits = logits / values["temperature"]
    if mode == "filtered":
        logits = likely(logits, values["top_k"], values["top_p"])
    key = jax.random.wrap_key_data(values["key"], impl=_KEY)

    def one(row: Any, place: Any, logits: Any) -> Any:
        return jax.random.categorical(jax.random.fold_in(jax.random.fold_in(key, row), place), logits)

    return jax.vmap(one)(jnp.arange(logits.shape[0]), places, logits).astype(jnp.int32)


def likely(logits: Any, top_k: Any, top_p: Any) -> Any:
    """Returns logits `[B, V]` with -inf for all but the most likely tokens; keeps ties with the last kept token.

    Example:
        >>> jnp.isfinite(likely(jnp.log(jnp.array([[0.5, 0.3, 0.2]])), 3, 0.6)).tolist()
        [[True, True, False]]
    """
    ordered = -jnp.sort(-logits, axis=-1)
    is_kept = jnp.arange(logits.shape[-1]) < top_k
    chances = jax.nn.softmax(jnp.where(is_kept, ordered, -jnp.inf), axis=-1)
    # Keep a token if those before it do not reach top_p.
    before = jnp.cumsum(chances, axis=-1) - chances
    is_kept &= (before < top_p) | (top_p >= 1)
    least = jnp.min(jnp.where(is_kept, ordered, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logits >= least, logits, -jnp.inf)
