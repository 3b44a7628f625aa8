"""The pipeline for flax linen modules, with the names and arguments of the toolkit these come from.

Positional arguments after `x` belong to its rows and are cut into microbatches with it; those without rows (scalars,
flags, None) and all keyword arguments go to every microbatch as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import lax

from meshwright.dtypes import is_float
from meshwright.mesh.axes import axis_index, axis_size, pcast_varying, varying_axes
from meshwright.parallel.pipeline.engine import pipeline
from meshwright.parallel.rows import split_rows
from meshwright.rng import fold_rng_over_axis
from meshwright.types import PyTree


def execute_pipeline_step(
    module: Callable[..., Any], state: PyTree, input: PyTree, *args: Any, model_axis_name: str, **kwargs: Any
) -> tuple[PyTree, PyTree]:
    """Runs one tick of a pipeline: returns what arrives for the next one, and the output, zeros but on the last stage.

    The first stage takes `input`, the others `state`, which the stage before sent. The module runs on whatever it is
    given, also while the pipeline fills and empties; `execute_pipeline` knows when that is, and does not.
    """
    num_stages = axis_size(model_axis_name, who="execute_pipeline_step")
    if num_stages == 1:
        output = module(input, *args, **kwargs)
        return output, output
    place = axis_index(model_axis_name, who="execute_pipeline_step")
    state = jax.tree.map(lambda mine, new: jnp.where(place == 0, new, mine), state, input)
    state = module(state, *args, **kwargs)
    output = jax.tree.map(lambda leaf: jnp.where(place == num_stages - 1, leaf, jnp.zeros_like(leaf)), state)
    pairs = [(stage, stage + 1) for stage in range(num_stages - 1)]
    return jax.tree.map(lambda leaf: lax.ppermute(leaf, model_axis_name, pairs), state), output


def execute_pipeline(
    module: Callable[..., Any], x: PyTree, *args: Any, num_microbatches: int, model_axis_name: str, **kwargs: Any
) -> PyTree:
    """Runs a batch through a module of which each device along a mesh axis holds one stage.

    The output is on the last stage; on the others it is zeros. The batch is cut into microbatches along its rows, and
    goes through in `num_microbatches + stages - 1` ticks.

    Args:
        module: a linen module, used inside another one's `__call__`, or any function of `x`. It must return what it
            takes. Its random streams differ by stage and by row, not by microbatch.
        args: more arguments of the module, cut into microbatches as `x` is, except scalars, flags and None.
        kwargs: more arguments, the same for all microbatches.
    """
    axis_size(model_axis_name, who="execute_pipeline")
    args, kwargs = _marked((args, kwargs), x, model_axis_name)
    with_rows = [position for position, arg in enumerate(args) if any(map(np.ndim, jax.tree.leaves(arg)))]

    def merged(rows: tuple[Any, ...]) -> list[Any]:
        merged = list(args)
        for position, arg in zip(with_rows, rows, strict=True):
            merged[position] = arg
        return merged

    run = functools.partial(
        pipeline, axis=model_axis_name, num_microbatches=num_microbatches, schedule="gpipe", combine="concatenate"
    )
    extras = [args[position] for position in with_rows]
    if not isinstance(module, nn.Module):
        return run(lambda _, h, *rows: module(h, *merged(rows), **kwargs), (), x, *extras)

    if module.is_initializing():
        # Variables are made by running the module as it is, once; the pipeline below is a pure function of them.
        parts = split_rows((x, extras), num_microbatches, who="execute_pipeline", part="microbatch")
        one, rows = parts.join([array[0] for array in parts.arrays])
        module(one, *merged(tuple(rows)), **kwargs)
    stage, variables = module.unbind()

    def call(variables: PyTree, h: PyTree, *rows: PyTree, rng: PyTree = None) -> PyTree:
        return stage.apply(variables, h, *merged(rows), rngs=rng, **kwargs)

    streams = {name: fold_rng_over_axis(module.make_rng(name), model_axis_name) for name in _streams(module)}
    return run(call, variables, x, *extras, rng=streams or None)


def _marked(tree: PyTree, x: PyTree, axis: str) -> Any:
    """Returns arguments with their arrays of floats marked as differing between stages, as those of a stage have to."""
    axes = sorted(frozenset({axis}).union(*map(varying_axes, jax.tree.leaves(x))))

    def mark(leaf: Any) -> Any:
        is_array = isinstance(leaf, (jax.Array, np.ndarray))
        return pcast_varying(leaf, axes) if is_array and is_float(leaf.dtype) else leaf

    return jax.tree.map(mark, tree)


def _streams(module: nn.Module) -> list[str]:
    # "params" is for making variables, which is over by the time the pipeline runs.
    scope = module.scope
    return [] if scope is None else sorted(name for name in scope.rngs if name != "params")


class PipelineModule(nn.Module):
    """A linen module whose inner module, one stage per device of a mesh axis, is run as a pipeline.

    Every device makes its own stage, so wrap it in `ModelParallelismWrapper` to give each its own parameters.

    Args:
        model_axis_name: the mesh axis that the stages lie along.
        num_microbatches: how many parts the batch is cut into.
        module_fn: makes the inner module.
    """

    model_axis_name: str
    num_microbatches: int
    module_fn: Callable[[], nn.Module]

    @nn.compact
    def __call__(self, x: PyTree, *args: Any, **kwargs: Any) -> PyTree:
        """Returns what `execute_pipeline` does for the inner module."""
        return execute_pipeline(
            self.module_fn(),
            x,
            *args,
            num_microbatches=self.num_microbatches,
            model_axis_name=self.model_axis_name,
            **kwargs,
        )
