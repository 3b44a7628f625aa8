"""Attribution of values to parts of a model: by scopes, by function names, through loops and calls."""

import jax
import jax.numpy as jnp
import pytest

from meshwright.plan.costs.saved_activations import REST, fewer, kind_of, kind_of_scopes, makers


def kinds(function, *arguments):
    jaxpr = jax.make_jaxpr(function)(*arguments).jaxpr
    return [kind_of(makers(jaxpr), var) for var in jaxpr.outvars]


@pytest.mark.parametrize(
    ("scopes", "kind"),
    [
        ("transpose(jvp(mlp))/while/body", "feed-forward"),
        ("Transformer/encoderblock_3/MultiHeadDotProductAttention_0/query", "attention"),
        ("Block_0/LayerNorm_1", "norms"),
        ("Block_0/ln_f", "norms"),
        ("normal", "normal"),
        ("attention/norm", "norms"),  # the innermost wins
        ("lm_head", "loss"),
        ("multihead", "multihead"),
        ("jvp(tok_embed)", "embedding"),
        ("vmap(ResNet)/Conv_12", "Conv"),
        ("", REST),
    ],
)
def test_scopes(scopes, kind):
    assert kind_of_scopes(scopes.split("/")) == kind


def test_residuals_of_a_loop_belong_to_scopes_inside():
    def body(h, x):
        with jax.named_scope("attn"):
            y = jnp.sin(h) * x
        with jax.named_scope("mlp"):
            z = jax.jit(jnp.tanh)(y)
        return h + z, (y, z, h)

    found = kinds(lambda h, xs: jax.lax.scan(body, h, xs), jnp.ones(3), jnp.ones((4, 3)))
    assert found == [REST, "attention", "feed-forward", REST]


def test_casts_and_reshapes_belong_to_the_scope_of_their_input():
    def wide(x):
        with jax.named_scope("norm"):
            y = jnp.tanh(x)
        return y.astype(jnp.float32).reshape(2, 2)

    assert kinds(wide, jnp.ones(4, jnp.bfloat16)) == ["norms"]


class Linear:
    def __call__(self, x):
        return jnp.sin(x)


class SelfAttention:
    def __call__(self, x):
        return Linear()(x)


def feed_forward(x):
    return jnp.cos(x)


def test_without_scopes_function_names_decide():
    def my_loss(x):
        return SelfAttention()(x), feed_forward(x), x * 2

    assert kinds(my_loss, 1.0) == ["attention", "feed-forward", REST]


def test_small_kinds_are_summed_as_the_rest():
    sizes = {f"k{place}": float(place) for place in range(1, 11)} | {REST: 100.0}
    found = fewer(sizes)
    assert list(found) == [*(f"k{place}" for place in range(10, 3, -1)), REST]
    assert sum(found.values()) == sum(sizes.values())
    assert fewer({REST: 1.0}) == {}
    assert fewer({"loss": 1.0, "norms": 2.0}) == {"norms": 2.0, "loss": 1.0}
