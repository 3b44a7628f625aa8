"""A collective over an axis that is not there: the error names the axis, the function and the line."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import meshwright as mw
from meshwright import P
from meshwright.parallel import local_map
from meshwright.train.axis_errors import axis_errors


def call(function, mesh="dp:2,tp:4"):
    def guarded(x):
        with axis_errors():
            return function(x)

    sized = mw.create_mesh(mesh)
    return jax.jit(local_map(guarded, mesh=sized, in_specs=P("dp"), out_specs=P("dp")))(jnp.ones(8))


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("psum", lambda x: lax.psum(x, "tpp")),
        ("psum", lambda x: lax.psum(x, ("dp", "tpp"))),
        ("pmean", lambda x: lax.pmean(x, "tpp")),
        ("all_gather", lambda x: lax.all_gather(x, "tpp")),
        ("ppermute", lambda x: lax.ppermute(x, "tpp", [(0, 1)])),
        ("axis_index", lambda x: x * lax.axis_index("tpp")),
    ],
)
def test_a_misspelled_axis(name, function):
    text = (
        rf"`{name}` at .*test_axis_errors.py:\d+ uses axis `tpp`, which the mesh dp=2 x tp=4 does not have.\n.*'tp'\?"
    )
    with pytest.raises(mw.JobError, match=text):
        call(function)


def test_an_axis_of_size_one_and_no_shard_map():
    with pytest.raises(mw.JobError, match=r"uses axis `tp`, which has size 1.\nhint: .*is_manual\('tp'\)"):
        call(lambda x: lax.psum(x, "tp"), mesh="dp:8,tp:1")
    with pytest.raises(mw.JobError, match=r"`psum` at .* uses axis `tp` outside of shard_map"), axis_errors():
        lax.psum(1.0, "tp")
    with (
        jax.set_mesh(mw.create_mesh("dp:2,tp:4")),
        pytest.raises(mw.JobError, match=r"uses axis `tp`, which is automatic here"),
        axis_errors(),
    ):
        jax.jit(lambda x: lax.psum(x, "tp"))(1.0)


def test_other_errors_pass_through():
    with pytest.raises(NameError, match="undefined"), axis_errors():
        undefined  # noqa: B018, F821
    with pytest.raises(AssertionError, match="own"), axis_errors():
        raise AssertionError("own")
    assert call(lambda x: lax.psum(x, "tp")).shape == (8,)
