"""Text from a language model while it is trained, from its parameters where they lie.

One program serves every prompt and length: it works on a window of fixed size, and each new token is one pass over it.
That is no way to serve a model, but enough to see what a run has learned, and needs nothing besides `model.apply`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from meshwright.errors import MeshwrightError
from meshwright.mesh.build import current_mesh
from meshwright.models.execution import Execution
from meshwright.models.language import LanguageModel
from meshwright.specs import spec_axes
from meshwright.train.precision import Precision
from meshwright.types import PyTree

if TYPE_CHECKING:
    from meshwright.loop.setup import RunSetup

TEMPERATURE = 0.7
"""How freely samples of a run are drawn: a little more likely than the model says, so that short training shows."""
# XLA decides how the work is split: there is one row, and a handful of tokens.
_RUN = Execution(tensor_axis=None, data_axes=(), pipeline_axis=None, sequence_parallel=False, attention="xla")


def make_sampler(
    model: LanguageModel, *, window: int, precision: Precision | str = "float32", vocab_size: int | None = None
) -> Sampler:
    """Returns `generate(params, prompt, num_tokens, seed=0, temperature=0.0)`, which is compiled once per mesh.

    Args:
        window: the most tokens, those of the prompt included.
        precision: what it computes in, as for a step.
        vocab_size: only tokens below it are drawn: a model may have room for more than its tokenizer knows.

    Example:
        >>> from meshwright.models import Decoder
        >>> model = Decoder.named("tiny")
        >>> generate = make_sampler(model, window=16)
        >>> generate(model.init(jax.random.key(0)), [1, 2, 3], 5).shape
        (5,)
    """
    if window < 2:
        raise MeshwrightError(f"a window of {window} tokens has no room for a prompt and an answer.", hint="2 or more.")
    return Sampler(model, window, Precision.named(precision), vocab_size or model.vocab_size)


class TrainingSamples:
    """Text that a model writes before it is trained, and after."""

    def __init__(self, setup: RunSetup) -> None:
        from meshwright.loop.sources import TextSource

        assert isinstance(setup.source, TextSource)
        assert setup.model is not None
        self.options, self.tell, self.tokenizer = setup.config.run, setup.tell, setup.source.tokenizer
        self.prompt = self.tokenizer.encode(self.options.prompt)
        self.generate = make_sampler(
            setup.model,
            window=len(self.prompt) + self.options.sample_tokens,
            precision=setup.precision,
            vocab_size=self.tokenizer.vocab_size,
        )
        self.sampled_at: int | None = None

    def begin(self, state: Any, sampled_at: int | None) -> None:
        """Shows what an untrained model writes; `sampled_at` is a trained step whose text is in the log already."""
        self.sampled_at = sampled_at
        if int(state.step) == 0:
            self.show(state, "before")

    def end(self, state: Any) -> None:
        """Shows what the trained model writes."""
        if int(state.step) != self.sampled_at:
            self.show(state, "after")

    def show(self, state: Any, when: str) -> None:
        """Generates some text, tells it and writes it down."""
        options, step = self.options, int(state.step)
        tokens = self.generate(
            state.params, self.prompt, options.sample_tokens, seed=options.seed, temperature=TEMPERATURE
        )
        text = self.tokenizer.decode(tokens)
        self.tell.log.event("sample", step, text, prompt=options.prompt, when=when)
        shown = "".join(letter if letter.isprintable() or letter == "\n" else "\N{MIDDLE DOT}" for letter in text)
        lines = "\n".join(f"    {line}" for line in (options.prompt + shown).splitlines())
        self.tell(f"a sample {when} training:\n{lines}")


class Sampler:
    """What `make_sampler` returns."""

    def __init__(self, model: LanguageModel, window: int, precision: Precision, vocab_size: int) -> None:
        self.model, self.window, self.precision = model, window, precision
        self._generate = jax.jit(functools.partial(_generate, model, precision, vocab_size), static_argnames="mesh")

    def __call__(
        self,
        params: PyTree,
        prompt: Sequence[int] | np.ndarray,
        num_tokens: int,
        *,
        seed: int = 0,
        temperature: float = 0.0,
    ) -> np.ndarray:
        """Returns the tokens that follow a prompt, without it; the same on every mesh, and on every process.

        With several processes, all of them must call it, with the same arguments.

        Args:
            params: on one device, or split over any mesh.
            temperature: 0 always takes the likeliest token; 1 draws as the model says, by `seed`.
        """
        prompt = np.asarray(prompt)
        self._check(prompt, num_tokens, temperature)
        tokens = np.zeros(self.window, np.int32)
        tokens[: len(prompt)] = prompt
        # As plain numbers, which are the same on all processes: arrays would belong to one.
        key = np.asarray(jax.random.key_data(jax.random.key(seed, impl="threefry2x32")))
        params, mesh = _one_copy(params)
        start, stop = np.int32(len(prompt)), np.int32(len(prompt) + num_tokens)
        result = self._generate(params, tokens, start, stop, key, np.float32(temperature), mesh=mesh)
        return np.asarray(result.addressable_data(0))[len(prompt) : len(prompt) + num_tokens]

    def _check(self, prompt: np.ndarray, num_tokens: int, temperature: float) -> None:
        if prompt.ndim != 1 or not len(prompt) or not np.issubdtype(prompt.dtype, np.integer):
            raise MeshwrightError(
                f"a prompt is a list of one or more token ids, not {prompt.dtype}{list(prompt.shape)}.",
                hint="tokenizer.encode(text); to start from nothing, the token that ends a document.",
            )
        if prompt.min() < 0 or prompt.max() >= self.model.vocab_size:
            raise MeshwrightError(
                f"the prompt holds token {prompt.max() if prompt.min() >= 0 else prompt.min()}; the model knows 0 to "
                f"{self.model.vocab_size - 1}.",
                hint="use the tokenizer that the model is trained with.",
            )
        if num_tokens < 1 or len(prompt) + num_tokens > self.window:
            raise MeshwrightError(
                f"{len(prompt)} tokens of a prompt and {num_tokens} new ones do not fit a window of {self.window}.",
                hint="a shorter prompt, fewer tokens, or make_sampler(window=...) with a larger one.",
            )
        if not (math.isfinite(temperature) and temperature >= 0):
            raise MeshwrightError(f"temperature={temperature} is no temperature.", hint="0 or more.")


def _generate(
    model: LanguageModel,
    precision: Precision,
    vocab_size: int,
    params: PyTree,
    tokens: Any,
    start: Any,
    stop: Any,
    key: Any,
    temperature: Any,
    *,
    mesh: Mesh | None,
) -> Any:
    key = jax.random.wrap_key_data(key, impl="threefry2x32")
    params = jax.tree.map(lambda leaf, dtype: leaf.astype(dtype), params, precision.compute_dtypes(params))

    def everywhere(x: Any) -> Any:
        return x if mesh is None else jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P()))

    def next_token(place: Any, tokens: Any) -> Any:
        def logits(h: Any, head: Any, _: Any) -> Any:
            # Of one position only: a vocabulary is wide.
            last = jax.lax.dynamic_index_in_dim(h[0], place - 1, keepdims=False)
            found = jnp.dot(last, head, preferred_element_type=jnp.float32)
            cap = model.logit_soft_cap
            return everywhere(found if cap is None else cap * jnp.tanh(found / cap))

        # What stands behind `place` is not seen: every layer is causal.
        found = model.apply(params, tokens[None], run=_RUN, finish=logits)[:vocab_size]
        drawn = jax.random.categorical(jax.random.fold_in(key, place), found / jnp.maximum(temperature, 1e-6))
        token = jnp.where(temperature > 0, drawn, jnp.argmax(found))
        return everywhere(tokens.at[place].set(token.astype(tokens.dtype)))

    if mesh is None:
        return jax.lax.fori_loop(start, stop, next_token, tokens)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return everywhere(jax.lax.fori_loop(start, stop, next_token, tokens))


def _one_copy(params: PyTree) -> tuple[PyTree, Mesh | None]:
    """Returns the parameters on as few devices as hold all of them, and the mesh of those.

    Devices along an axis that splits nothing would all compute the same. Where devices are simulated, that is work for
    the same processor: eight times as much on `dp:8`. Nothing is copied. Several processes stay on the whole mesh, of
    which all have a part; so does a program for which a mesh is in force, which jax does not let shrink.
    """
    shardings = [leaf.sharding for leaf in jax.tree.leaves(params)]
    mesh = shardings[0].mesh if isinstance(shardings[0], NamedSharding) else None
    if mesh is None or not isinstance(mesh, Mesh) or any(sharding.mesh != mesh for sharding in shardings):
        return params, None
    used = [axis for sharding in shardings for axis in spec_axes(sharding.spec)]
    spare = [axis for axis in mesh.axis_names if mesh.shape[axis] > 1 and axis not in used]
    if not spare or jax.process_count() > 1 or current_mesh() is not None:
        return params, mesh
    places = tuple(slice(0, 1) if axis in spare else slice(None) for axis in mesh.axis_names)
    part = Mesh(mesh.devices[places], mesh.axis_names, axis_types=mesh.axis_types)

    def on_part(leaf: Any) -> Any:
        here = {shard.device: shard.data for shard in leaf.addressable_shards}
        sharding = NamedSharding(part, leaf.sharding.spec)
        pieces = [here[device] for device in part.devices.flat]
        return jax.make_array_from_single_device_arrays(leaf.shape, sharding, pieces)

    return jax.tree.map(on_part, params), part
