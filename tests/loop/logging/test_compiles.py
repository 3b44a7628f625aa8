"""Compile times that nest, and the causes of a second compilation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.loop.logging.compiles import CompileClock, StepCompiles, explain_changes

TRACE, LOWER, COMPILE = (
    f"/jax/core/compile/{name}_duration" for name in ("jaxpr_trace", "jaxpr_to_mlir_module", "backend_compile")
)


def test_nested_intervals_count_once():
    now = [0.0]
    clock = CompileClock(now=lambda: now[0])
    for now[0], event, seconds in [
        (2.0, TRACE, 1.0),  # inside the next
        (4.0, TRACE, 1.5),  # inside the next
        (5.0, TRACE, 5.0),
        (6.0, LOWER, 1.0),
        (9.0, COMPILE, 3.0),
        (20.0, COMPILE, 2.0),
        (21.0, "/jax/compilation_cache/compile_time_saved_sec", 7.0),
        (22.0, "/jax/other_duration", 9.0),
    ]:
        clock.on_duration(event, seconds)
    clock.on_event("/jax/compilation_cache/cache_hits")
    found = clock.totals()
    assert (found.seconds, found.count, found.hits, found.saved) == (11.0, 2, 1, 7.0)


@pytest.fixture(scope="module")
def told():
    """Events of a step that compiles for five kinds of arguments, and runs twice for each."""
    events = []
    compiles = StepCompiles(lambda kind, number, text, **facts: events.append((kind, number, text, facts)))
    jitted = jax.jit(lambda state, batch: (state, sum(leaf.sum() for leaf in jax.tree.leaves(batch))))
    mesh = mw.create_mesh("dp:8")
    batches = [
        {"x": jnp.ones((8, 4))},
        {"x": jnp.ones((16, 4))},
        {"x": jnp.ones((16, 4), jnp.bfloat16)},
        {"x": jax.device_put(np.ones((16, 4), jnp.bfloat16), NamedSharding(mesh, P("dp")))},
        {"x": jnp.ones((8, 4)), "y": jnp.ones(2)},
    ]
    for number, batch in enumerate([batch for batch in batches for _ in range(2)], start=1):
        state = {"w": jnp.zeros(3)}
        with compiles.watched(state, batch, number):
            jitted(state, batch)
    return events


def test_only_new_arguments_compile(told):
    assert [(kind, number) for kind, number, _, _ in told] == [
        ("compile", 1), ("recompile", 3), ("recompile", 5), ("recompile", 7), ("recompile", 9),
    ]  # fmt: skip
    assert told[0][2].startswith("compiled the step in ")
    assert told[0][3]["seconds_compiling"] > 0


@pytest.mark.parametrize(
    ("index", "cause"),
    [
        (1, "batch/x changed from float32[8,4] on SingleDeviceSharding"),
        (2, "to bfloat16[16,4] on"),
        (3, "to bfloat16[16,4] on P('dp',)"),
        (4, "batch/y is new (float32[2] on"),
    ],
)
def test_the_warning_names_the_argument(told, index, cause):
    _, _, text, facts = told[index]
    assert text.startswith("warning: the step compiled again in ")
    assert cause in text
    assert "state/w" not in text
    assert facts["changes"]


def test_many_changes_are_counted():
    before = {f"state/{number}": "float32[2]" for number in range(9)}
    assert len(explain_changes(before, {})) == 9
