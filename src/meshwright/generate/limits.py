"""Checks before anything is allocated: prompts, lengths, and the memory of a cache."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.errors import MeshwrightError
from meshwright.generate.loaded_weights import unstacked
from meshwright.generate.passes import Cache, read_prompts
from meshwright.generate.spread import Spread
from meshwright.layout import format_bytes
from meshwright.models.language import LanguageModel
from meshwright.train.precision import Precision

_MOST_PLACES = 2**31 - 1  # places are int32


def check_prompts(prompts: Sequence[np.ndarray], num_tokens: int, length: int, vocab_size: int) -> None:
    """Raises unless all prompts are token ids of the model and leave room for the new tokens."""
    if not prompts:
        raise MeshwrightError("there are no prompts.", hint="pass a list of prompts.")
    for prompt in prompts:
        if prompt.ndim != 1 or not len(prompt) or not np.issubdtype(prompt.dtype, np.integer):
            raise MeshwrightError(
                f"a prompt must be a non-empty list of token ids; got {prompt.dtype}{list(prompt.shape)}.",
                hint="use tokenizer.encode(text), or the end-of-document token for an empty prompt.",
            )
        if prompt.min() < 0 or prompt.max() >= vocab_size:
            raise MeshwrightError(
                f"the prompt holds token {prompt.max() if prompt.min() >= 0 else prompt.min()}; the model's ids are 0 "
                f"to {vocab_size - 1}.",
                hint="use the tokenizer of the model.",
            )
    longest = max(map(len, prompts))
    if num_tokens < 0 or longest + num_tokens > length:
        raise MeshwrightError(
            f"{longest} prompt tokens and {num_tokens} new tokens do not fit a length of {length}.",
            hint="shorten the prompt, generate fewer tokens, or pass a larger length to make_generator.",
        )


def check_room(model: LanguageModel, num_rows: int, length: int, precision: Precision, spread: Spread) -> None:
    """Raises if the caches of a batch are larger than the memory of the devices."""
    limit, num_devices = _memory(), 1 if spread.mesh is None else spread.mesh.size
    if length > _MOST_PLACES:
        raise MeshwrightError(f"a row cannot have {length:,} tokens.", hint=f"use at most {_MOST_PLACES:,}.")
    needed = cache_bytes(model, num_rows, length, precision)
    if limit is not None and needed > limit * num_devices:
        raise MeshwrightError(
            f"the cache of {num_rows} rows of {length:,} tokens takes {format_bytes(needed)}, more than the "
            f"{format_bytes(limit * num_devices)} of {num_devices} devices.",
            hint="generate fewer tokens or fewer rows, or use a larger mesh.",
        )


@functools.lru_cache(maxsize=64)
def cache_shapes(model: LanguageModel, num_rows: int, length: int, precision: Precision) -> Cache:
    """Returns the shapes and dtypes of the caches of a batch with room for `length` tokens per row."""

    def caches() -> Any:
        weights = unstacked(model.init(jax.random.key(0)), precision=precision)
        tokens, lengths = jnp.zeros((num_rows, 1), jnp.int32), jnp.ones(num_rows, jnp.int32)
        return read_prompts(model, weights, tokens, lengths, length=length, spread=Spread())[1]

    found: Cache = jax.eval_shape(caches)
    return found


def cache_bytes(model: LanguageModel, num_rows: int, length: int, precision: Precision) -> int:
    """Returns the bytes of the caches of a batch.

    Example:
        >>> from meshwright.models import Decoder
        >>> cache_bytes(Decoder.named("tiny"), 2, 100, Precision.named("mixed")) == 2 * 2 * 2 * 100 * 64 * 2
        True
    """
    leaves = jax.tree.leaves(cache_shapes(model, num_rows, length, precision))
    return sum(int(leaf.size) * leaf.dtype.itemsize for leaf in leaves)


def _memory() -> int | None:
    """Returns the memory of one device in bytes, or None if unknown; simulated devices share that of the machine."""
    device = jax.local_devices()[0]
    limit = (device.memory_stats() or {}).get("bytes_limit")
    if limit is not None or device.platform != "cpu":
        return limit
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // jax.local_device_count()
    except (AttributeError, ValueError, OSError):  # not available on this system
        return None
