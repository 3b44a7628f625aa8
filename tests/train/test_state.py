"""One seed gives the same bits on every mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.train import Precision, init_state, state_layout
from meshwright.train.state import gradient_specs

MESHES = ["dp:8", "fsdp:8", "tp:8", "dp:2,fsdp:2,tp:2", "fsdp:4,tp:2", "pp:2,tp:2,dp:2"]


def bits(tree):
    return [np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x) for x in tree]


@pytest.mark.parametrize("mesh", MESHES)
def test_one_seed_gives_one_state_on_every_mesh(lab, mesh, assert_placed):
    # With shards of 3 columns (d_model 24), the last bit of jax.random.normal used to differ.
    job, optimizer = lab.decoder_job(d_model=24, num_heads=8, head_dim=4, d_ff=40), optax.adam(1e-3)
    alone = init_state(job, optimizer, state_layout(job, optimizer, lab.one_device()), jax.random.key(3))
    layout = state_layout(job, optimizer, mw.create_mesh(mesh))
    state = init_state(job, optimizer, layout, jax.random.key(3))
    for one, other in zip(bits(jax.tree.leaves(alone)), bits(jax.tree.leaves(state)), strict=True):
        np.testing.assert_array_equal(one, other)
    q = state.params["layers"]["attn"]["q"]
    assert_placed(q, layout.mesh, layout["params/layers/attn/q"].spec, np.asarray(q))


def test_statistics_are_split_like_their_parameters(lab):
    layout = state_layout(lab.decoder_job(), optax.adam(1e-3), mw.create_abstract_mesh("dp:2,fsdp:2,tp:2"))
    assert (
        layout["opt_state/0/mu/layers/mlp/down"].spec == layout["params/layers/mlp/down"].spec == P(None, "tp", "fsdp")
    )
    assert gradient_specs(layout) == layout.specs.params


@pytest.mark.parametrize(("mesh", "spec"), [
    ("dp:4,tp:2", P("dp", "tp")),
    ("dp:2,fsdp:2,tp:2", P(("fsdp", "dp"), "tp")),
    ("dp:8", P("dp")),
], ids=str)  # fmt: skip
def test_zero_splits_statistics_and_gradients_finer(lab, mesh, spec):
    mesh = mw.create_abstract_mesh(mesh)
    layout = state_layout(lab.decoder_job(num_layers=3), optax.adam(1e-3), mesh, zero_axis="dp")
    plain = state_layout(lab.decoder_job(num_layers=3), optax.adam(1e-3), mesh)
    assert layout["opt_state/0/mu/head/kernel"].spec == spec
    assert layout["opt_state/0/mu/head/kernel"].reason == "ZeRO-1 over dp"
    assert layout["params/head/kernel"].spec == plain["params/head/kernel"].spec
    assert gradient_specs(layout)["head"]["kernel"] == spec
    ways = mesh.shape["dp"]

    def of(layout):
        return sum(leaf.bytes_per_device for leaf in layout.leaves if leaf.name.startswith("opt_state/0/mu"))

    assert of(layout) == of(plain) // ways


def test_zero_gives_the_reason_for_a_whole_leaf():
    job = mw.Job(init=lambda key: {"w": jnp.zeros((3, 5))}, rules=[("w", P())])
    layout = state_layout(job, optax.adam(1e-3), mw.create_abstract_mesh("dp:8"), zero_axis="dp")
    assert layout["opt_state/0/mu/w"].reason == "dp divides no dim of P()"
    with pytest.raises(mw.MeshError, match="did you mean 'dp'"):
        state_layout(job, optax.adam(1e-3), mw.create_abstract_mesh("dp:8"), zero_axis="pd")


def test_precision_sets_stored_and_compute_dtypes(lab):
    job, mesh = lab.decoder_job(), mw.create_abstract_mesh("fsdp:8")
    layout = state_layout(job, optax.adam(1e-3), mesh, precision="bfloat16")
    assert layout["params/head/kernel"].dtype == layout["opt_state/0/mu/head/kernel"].dtype == jnp.bfloat16
    params = state_layout(job, optax.sgd(1.0), mesh).abstract.params
    dtypes = Precision.named("mixed").compute_dtypes(params)
    assert dtypes["head"]["kernel"] == jnp.bfloat16
    assert dtypes["layers"]["attn_norm"] == dtypes["final_norm"]["scale"] == jnp.float32


@pytest.mark.parametrize(("make", "text"), [
    (lambda: Precision.named("mixd"), "did you mean 'mixed'"),
    (lambda: Precision(compute="int8"), "compute=int8 is not a float dtype"),
    (lambda: Precision(accumulate="bfloat16"), "accumulate must be float32; got bfloat16"),
])  # fmt: skip
def test_precision_errors(make, text):
    with pytest.raises(mw.MeshwrightError, match=text):
        make()
