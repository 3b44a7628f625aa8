import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

import meshwright as mw
from meshwright import P


def test_scalars_become_floats_and_arrays_numpy():
    result = mw.get_metrics(
        {"loss": jnp.float32(1.5), "grad": {"norm": jnp.bfloat16(2), "hist": jnp.arange(3)}, "n": 7}
    )
    assert result["loss"] == 1.5
    assert type(result["loss"]) is float
    assert result["grad"]["norm"] == 2.0
    assert result["n"] == 7.0
    np.testing.assert_array_equal(result["grad"]["hist"], np.arange(3, dtype=np.int32), strict=True)


def test_arrays_on_a_mesh_are_gathered():
    mesh = mw.create_mesh("dp:8")
    value = jax.device_put(np.arange(8, dtype=np.float32), NamedSharding(mesh, P("dp")))
    np.testing.assert_array_equal(mw.get_metrics({"x": value})["x"], np.arange(8, dtype=np.float32), strict=True)


def test_unreplicate_takes_the_first_copy():
    metrics = {"loss": jnp.arange(4.0) + 3, "nested": [{"acc": jnp.ones((4, 2)) * 5}]}
    result = mw.get_metrics(metrics, unreplicate=True)
    assert result["loss"] == 3.0
    np.testing.assert_array_equal(result["nested"][0]["acc"], np.full(2, 5, np.float32))


def test_stack_puts_steps_first():
    steps = [{"loss": jnp.float32(i), "nested": {"x": jnp.full((2,), i)}} for i in range(3)]
    result = mw.get_metrics(steps, stack=True)
    np.testing.assert_array_equal(result["loss"], np.arange(3, dtype=np.float32), strict=True)
    np.testing.assert_array_equal(result["nested"]["x"], [[0, 0], [1, 1], [2, 2]])


def test_stack_and_unreplicate():
    steps = ({"loss": jnp.full((8,), i)} for i in range(3))
    result = mw.get_metrics(list(steps), unreplicate=True, stack=True)
    np.testing.assert_array_equal(result["loss"], [0, 1, 2])


@pytest.mark.parametrize(
    ("metrics", "options", "text"),
    [
        ({"a": {"loss": jnp.float32(1)}}, {"unreplicate": True}, r"`a/loss` is a scalar, .*\nhint: drop unreplicate"),
        ([], {"stack": True}, "at least one step"),
        ([{"a": 1.0}, {"a": 1.0, "b": {"c": 2.0}}], {"stack": True}, "steps 1 and 0 have different metrics: b/c"),
    ],
)
def test_metrics_that_cannot_be_fetched(metrics, options, text):
    with pytest.raises(mw.TreeError, match=text):
        mw.get_metrics(metrics, **options)
