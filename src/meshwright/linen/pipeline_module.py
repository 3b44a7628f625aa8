"""Pipelines of flax linen modules, with the API of xlstm_jax.

Positional arguments after `x` are split into microbatches along with it; scalars, flags, None and all keyword arguments
are passed to every microbatch.
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
    """Runs one tick of a pipeline and returns the next `state` and the output, which is zero except on the last stage.

    The first stage takes `input`, the others take `state` from the previous stage. The module also runs on the empty
    ticks while the pipeline fills and drains, which `execute_pipeline` skips.

    Example:
        >>> import meshwright as mw
        >>> tick = lambda x: execute_pipeline_step(lambda h: h + 1, x, x, model_axis_name="pp")[0]
        >>> with jax.set_mesh(mw.create_mesh("pp:8")):  # each stage gets the output of the stage before
        ...     jax.shard_map(tick, in_specs=mw.P("pp"), out_specs=mw.P("pp"))(jnp.arange(8)).tolist()
        [0, 1, 2, 3, 4, 5, 6, 7]
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
    """Runs a batch through a pipeline with one stage per device along a mesh axis.

    The output is on the last stage, and zero on the others. A batch takes `num_microbatches + stages - 1` ticks.

    Args:
        module: a linen module inside another module's `__call__`, or any function. Its output must have the structure,
            shapes and dtypes of `x`. Its random streams differ by stage and by row, not by microbatch.
        x: the batch, which is split into microbatches along its rows.
        args: more arguments of the module, split like `x`, except scalars, flags and None.
        kwargs: more arguments, the same for all microbatches.

    Example:
        >>> import meshwright as mw
        >>> stages = lambda x: execute_pipeline(lambda h: h + 1, x, num_microbatches=4, model_axis_name="pp")
        >>> with jax.set_mesh(mw.create_mesh("pp:2", devices=2)):  # zeros on the first stage, the output on the second
        ...     jax.shard_map(stages, in_specs=mw.P(), out_specs=mw.P("pp"))(jnp.zeros(4)).tolist()
        [0.0, 0.0, 0.0, 0.0, 2.0, 2.0, 2.0, 2.0]
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
        # One plain call creates the variables, because the pipeline below is a pure function of them.
        parts = split_rows((x, extras), num_microbatches, who="execute_pipeline", part="microbatch")
        one, rows = parts.join([array[0] for array in parts.arrays])
        module(one, *merged(tuple(rows)), **kwargs)
    stage, variables = module.unbind()

    def call(variables: PyTree, h: PyTree, *rows: PyTree, rng: PyTree = None) -> PyTree:
        return stage.apply(variables, h, *merged(rows), rngs=rng, **kwargs)

    # The "params" stream is used only to create variables, before the pipeline runs.
    names = sorted(name for name in (module.scope.rngs if module.scope else ()) if name != "params")
    streams = {name: fold_rng_over_axis(module.make_rng(name), model_axis_name) for name in names}
    return run(call, variables, x, *extras, rng=streams or None)


def _marked(tree: PyTree, x: PyTree, axis: str) -> Any:
    """Casts float arrays to varying along the pipeline axis and the axes of `x`, as a stage requires."""
    axes = sorted(frozenset({axis}).union(*map(varying_axes, jax.tree.leaves(x))))

    def mark(leaf: Any) -> Any:
        is_array = isinstance(leaf, (jax.Array, np.ndarray))
        return pcast_varying(leaf, axes) if is_array and is_float(leaf.dtype) else leaf

    return jax.tree.map(mark, tree)


class PipelineModule(nn.Module):
    """A linen module that runs its inner module as a pipeline, with one stage per device of a mesh axis.

    `module_fn` constructs the inner module; wrap it in `ModelParallelismWrapper` to give each stage its own parameters.
    """

    model_axis_name: str
    num_microbatches: int
    module_fn: Callable[[], nn.Module]

    @nn.compact
    def __call__(self, x: PyTree, *args: Any, **kwargs: Any) -> PyTree:
        """Runs `execute_pipeline` on the inner module."""
        return execute_pipeline(
            self.module_fn(),
            x,
            *args,
            num_microbatches=self.num_microbatches,
            model_axis_name=self.model_axis_name,
            **kwargs,
        )
