"""Text samples from a language model during training, without moving its parameters.

Each new token is a full pass over a window of fixed size, so one program serves every prompt and length. That is too
slow for serving, but it needs only `model.apply`.
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
from meshwright.loop.before_after import BeforeAfter
from meshwright.mesh.build import current_mesh
from meshwright.models.execution import Execution
from meshwright.models.language import LanguageModel
from meshwright.specs import spec_axes
from meshwright.train.precision import Precision
from meshwright.types import PyTree

if TYPE_CHECKING:
    from meshwright.loop.setup import RunSetup

TEMPERATURE = 0.7
"""Sampling temperature; below 1, so that short training already shows."""
# Leave the partitioning to XLA: there is only one row.
_RUN = Execution(tensor_axis=None, data_axes=(), pipeline_axis=None, sequence_parallel=False, attention="xla")


def make_sampler(
    model: LanguageModel, *, window: int, precision: Precision | str = "float32", vocab_size: int | None = None
) -> Sampler:
    """Returns `generate(params, prompt, num_tokens, seed=0, temperature=0.0)`, compiled once per mesh.

    Args:
        window: maximum number of tokens, including the prompt.
        precision: compute precision, as for a train step.
        vocab_size: sample only token ids below this (default: the model's vocabulary).

    Example:
        >>> from meshwright.models import Decoder
        >>> model = Decoder.named("tiny")
        >>> generate = make_sampler(model, window=16)
        >>> generate(model.init(jax.random.key(0)), [1, 2, 3], 5).shape
        (5,)
    """
    if window < 2:
        raise MeshwrightError(f"window={window} cannot hold a prompt and a new token.", hint="use at least 2.")
    return Sampler(model, window, Precision.named(precision), vocab_size or model.vocab_size)


class TrainingSamples(BeforeAfter):
    """Text samples before and after training."""

    def __init__(self, setup: RunSetup) -> None:
        from meshwright.loop.sources import TextSource

        assert isinstance(setup.source, TextSource)
        assert setup.model is not None
        self.options, self.tell, self.tokenizer = setup.config.run, setup.tell, setup.source.tokenizer
        self.prompt = self.tokenizer.encode(self.options.prompt)
        lora = getattr(setup.job, "lora", None)
        self.whole = (lambda params: params) if lora is None else jax.jit(lora.adapters.merged)
        self.generate = make_sampler(
            setup.model,
            window=len(self.prompt) + self.options.sample_tokens,
            precision=setup.precision,
            vocab_size=self.tokenizer.vocab_size,
        )

    def show(self, state: Any, when: str) -> None:
        options, step = self.options, int(state.step)
        tokens = self.generate(
            self.whole(state.params), self.prompt, options.sample_tokens, seed=options.seed, temperature=TEMPERATURE
        )
        text = self.tokenizer.decode(tokens)
        self.tell.log.event("sample", step, text, prompt=options.prompt, when=when)
        shown = "".join(letter if letter.isprintable() or letter == "\n" else "\N{MIDDLE DOT}" for letter in text)
        lines = "\n".join(f"    {line}" for line in (options.prompt + shown).splitlines())
        self.tell(f"sample {when} training:\n{lines}")


class Sampler:
    """The function that `make_sampler` returns."""

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
        """Returns the tokens after a prompt, the same on every mesh; all processes must call it alike.

        Args:
            params: parameters on one device, or sharded over any mesh.
            temperature: sampling temperature; 0 always takes the most likely token.
        """
        prompt = np.asarray(prompt)
        self._check(prompt, num_tokens, temperature)
        tokens = np.zeros(self.window, np.int32)
        tokens[: len(prompt)] = prompt
        # A NumPy array is the same on all processes; a JAX array would belong to one.
        key = np.asarray(jax.random.key_data(jax.random.key(seed, impl="threefry2x32")))
        params, mesh = _one_copy(params)
        start, stop = np.int32(len(prompt)), np.int32(len(prompt) + num_tokens)
        result = self._generate(params, tokens, start, stop, key, np.float32(temperature), mesh=mesh)
        return np.asarray(result.addressable_data(0))[len(prompt) : len(prompt) + num_tokens]

    def _check(self, prompt: np.ndarray, num_tokens: int, temperature: float) -> None:
        if prompt.ndim != 1 or not len(prompt) or not np.issubdtype(prompt.dtype, np.integer):
            raise MeshwrightError(
                f"a prompt must be a non-empty list of token ids; got {prompt.dtype}{list(prompt.shape)}.",
                hint="use tokenizer.encode(text), or the end-of-document token for an empty prompt.",
            )
        if prompt.min() < 0 or prompt.max() >= self.model.vocab_size:
            raise MeshwrightError(
                f"the prompt holds token {prompt.max() if prompt.min() >= 0 else prompt.min()}; the model's ids are 0 "
                f"to {self.model.vocab_size - 1}.",
                hint="use the tokenizer of the model.",
            )
        if num_tokens < 1 or len(prompt) + num_tokens > self.window:
            raise MeshwrightError(
                f"{len(prompt)} prompt tokens and {num_tokens} new tokens do not fit a window of {self.window}.",
                hint="shorten the prompt, generate fewer tokens, or pass a larger window to make_sampler.",
            )
        if not (math.isfinite(temperature) and temperature >= 0):
            raise MeshwrightError(
                f"temperature={temperature} is out of range.", hint="use a finite number of at least 0."
            )


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
            # Compute the logits of one position only, since the vocabulary is large.
            last = jax.lax.dynamic_index_in_dim(h[0], place - 1, keepdims=False)
            found = jnp.dot(last, head, preferred_element_type=jnp.float32)
            cap = model.logit_soft_cap
            return everywhere(found if cap is None else cap * jnp.tanh(found / cap))

        # Every layer is causal, so tokens after `place` have no effect.
        found = model.apply(params, tokens[None], run=_RUN, finish=logits)[:vocab_size]
        drawn = jax.random.categorical(jax.random.fold_in(key, place), found / jnp.maximum(temperature, 1e-6))
        token = jnp.where(temperature > 0, drawn, jnp.argmax(found))
        return everywhere(tokens.at[place].set(token.astype(tokens.dtype)))

    if mesh is None:
        return jax.lax.fori_loop(start, stop, next_token, tokens)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return everywhere(jax.lax.fori_loop(start, stop, next_token, tokens))


def _one_copy(params: PyTree) -> tuple[PyTree, Mesh | None]:
    """Returns one copy of the parameters, on as few devices as hold it, and the mesh of those devices.

    Replicas would repeat the same work, which is slow on simulated devices. Nothing is copied. Runs of several
    processes keep the whole mesh, and so do programs under a current mesh, which JAX does not let shrink.
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
