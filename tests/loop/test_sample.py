"""Generated text: equal to the model's own predictions, and the same on every mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshwright as mw
from meshwright.loop.sample import _one_copy, make_sampler
from meshwright.models import XLSTM, Decoder

SIZES = {"vocab_size": 64, "num_layers": 2, "d_model": 32, "num_heads": 8, "d_ff": 64}
PROMPT = [3, 14, 15, 9]


def sharpened(model):
    """Random parameters whose greedy choices are far from ties, so that rounding does not change them."""
    params = model.init(jax.random.key(0))
    params["head"]["kernel"] = 3 * params["head"]["kernel"]
    return params


def greedy_reference(model, params, prompt, num_tokens):
    """Greedy decoding with a full forward pass per token."""
    text = list(prompt)
    for _ in range(num_tokens):
        text.append(int(jnp.argmax(model.apply(params, jnp.array([text]))[0, -1])))
    return text[len(prompt) :]


@pytest.fixture(scope="module", params=[Decoder, XLSTM], ids=["decoder", "xlstm"])
def known(request):
    model = request.param(**SIZES)
    params = sharpened(model)
    return model, params, make_sampler(model, window=24)(params, PROMPT, 20).tolist()


def test_greedy_tokens_match_the_model(known):
    model, params, tokens = known
    assert tokens[:3] == greedy_reference(model, params, PROMPT, 3)
    assert len(set(tokens)) > 3


@pytest.mark.parametrize("mesh", ["dp:8", "fsdp:8", "tp:8", "dp:2,fsdp:2,tp:2", "pp:2,tp:4"])
def test_every_mesh_generates_the_same_tokens(known, mesh):
    model, params, tokens = known
    layout = mw.make_layout(model.rules, params, mw.create_mesh(mesh))
    assert make_sampler(model, window=24)(layout.shard(params), PROMPT, 20).tolist() == tokens


def test_one_program_serves_all_prompts_lengths_seeds_and_temperatures(count_programs):
    model = Decoder(**SIZES)
    params = model.init(jax.random.key(0))
    generate = make_sampler(model, window=24)
    generate(params, PROMPT, 4)
    with count_programs() as compiled:
        generate(params, [5], 20, seed=3, temperature=0.7)
        generate(params, [1] * 20, 1)
    assert not compiled


def test_a_seed_gives_one_text_and_temperature_spreads(known):
    model, params, greedy = known
    layout = mw.make_layout(model.rules, params, mw.create_mesh("dp:2,fsdp:2,tp:2"))
    generate = make_sampler(model, window=24)
    one = generate(params, PROMPT, 20, seed=1, temperature=1.5)
    np.testing.assert_array_equal(generate(params, PROMPT, 20, seed=1, temperature=1.5), one)
    np.testing.assert_array_equal(generate(layout.shard(params), PROMPT, 20, seed=1, temperature=1.5), one)
    assert generate(params, PROMPT, 20, seed=2, temperature=1.5).tolist() != one.tolist()
    assert generate(params, PROMPT, 20, seed=1, temperature=1e-3).tolist() == greedy
    # Each position draws anew: a shared draw would repeat one token at this temperature.
    assert len(set(generate(params, PROMPT, 20, seed=1, temperature=1e4).tolist())) > 8


def test_token_frequencies_match_the_model():
    model = Decoder(**(SIZES | {"vocab_size": 8}))
    params = model.init(jax.random.key(0))
    wanted = jax.nn.softmax(model.apply(params, jnp.array([[1, 2]]))[0, -1])
    generate = make_sampler(model, window=8)
    drawn = [int(generate(params, [1, 2], 1, seed=seed, temperature=1.0)[0]) for seed in range(500)]
    shares = np.bincount(drawn, minlength=8) / 500
    # Five standard deviations of a frequency over 500 draws.
    np.testing.assert_allclose(shares, wanted, atol=5 * np.sqrt(0.25 / 500))
    assert np.abs(shares - wanted).sum() < np.abs(shares - 1 / 8).sum()


@pytest.mark.parametrize(("mesh", "devices"), [("dp:8", 1), ("fsdp:8", 8), ("dp:2,fsdp:2,tp:2", 4), ("dp:4,tp:2", 2)])
def test_replicas_do_not_repeat_the_work(mesh, devices):
    model = Decoder(**SIZES)
    params = model.init(jax.random.key(0))
    placed = mw.make_layout(model.rules, params, mw.create_mesh(mesh)).shard(params)
    fewer, part = _one_copy(placed)
    assert part.size == devices
    buffers = {
        shard.device: shard.data.unsafe_buffer_pointer() for shard in placed["embed"]["table"].addressable_shards
    }
    table = fewer["embed"]["table"]
    assert len(table.sharding.device_set) == devices
    assert all(buffers[shard.device] == shard.data.unsafe_buffer_pointer() for shard in table.addressable_shards)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(fewer), jax.device_get(params))


def test_a_step_can_donate_parameters_that_were_sampled_from():
    """Sampling reads the same buffers that the next step donates."""
    model = Decoder(**SIZES)
    params = model.init(jax.random.key(0))
    layout = mw.make_layout(model.rules, params, mw.create_mesh("dp:8"))
    step = jax.jit(lambda params: jax.tree.map(lambda leaf: 2 * leaf, params), donate_argnums=0)
    generate = make_sampler(model, window=8)
    placed = layout.shard(params)
    for _ in range(2):
        before = placed
        generate(before, [1], 3)
        placed = step(before)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before))
    jax.tree.map(lambda new, old: np.testing.assert_array_equal(new, 4 * old), jax.device_get(placed), params)


def test_only_token_ids_of_the_tokenizer_are_drawn():
    """The model's vocabulary is larger, and all its tokens are equally likely here."""
    model = Decoder(**SIZES)
    params = jax.tree.map(jnp.zeros_like, model.init(jax.random.key(0)))
    drawn = make_sampler(model, window=24, vocab_size=10)(params, [1], 23, temperature=1.0)
    assert drawn.max() < 10
    assert make_sampler(model, window=24)(params, [1], 23, temperature=1.0).max() >= 10


def test_precision_is_that_of_the_step():
    model = Decoder(**SIZES)
    params = model.init(jax.random.key(0))
    program = make_sampler(model, window=12, precision="mixed")._generate.lower(
        params, np.zeros(12, np.int32), np.int32(1), np.int32(2), np.zeros(2, np.uint32), np.float32(0), mesh=None
    )
    matmuls = [line for line in program.as_text().splitlines() if "dot_general" in line]
    assert matmuls
    assert all("bf16" in line for line in matmuls)


def test_a_current_mesh_changes_nothing(known):
    model, params, tokens = known
    mesh = mw.create_mesh("dp:4,tp:2")
    layout = mw.make_layout(model.rules, params, mesh)
    sharded = layout.shard(params)
    with jax.set_mesh(mesh):
        assert make_sampler(model, window=24)(sharded, PROMPT, 20).tolist() == tokens


@pytest.mark.parametrize(
    ("prompt", "options", "text"),
    [
        ([], {}, r"a prompt must be a non-empty list of token ids"),
        ([64], {}, r"holds token 64; the model's ids are 0 to 63"),
        ([-1, 3], {}, r"holds token -1"),
        (["a"], {}, r"got <U1\[1\]"),
        ([1], {"num_tokens": 24}, r"1 prompt tokens and 24 new tokens do not fit a window of 24"),
        ([1], {"num_tokens": 0}, r"0 new tokens do not fit"),
        ([1], {"temperature": -1.0}, r"temperature=-1.0 is out of range"),
    ],
)
def test_invalid_arguments_are_errors(prompt, options, text):
    generate = make_sampler(Decoder(**SIZES), window=24)
    with pytest.raises(mw.MeshwrightError, match=text):
        generate({}, prompt, **({"num_tokens": 3} | options))
    with pytest.raises(mw.MeshwrightError, match="window=1 cannot hold a prompt and a new token"):
        make_sampler(Decoder(**SIZES), window=1)
