"""Drawing tokens: frequencies, filters and random numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshwright as mw
from meshwright.generate import Sampling, make_generator
from meshwright.generate.draw import draw, likely
from meshwright.models import Decoder

LOGITS = np.log(np.array([0.4, 0.3, 0.2, 0.06, 0.04], np.float32))


def drawn(count, **options):
    """Draws one token for each of many rows with the same logits."""
    sampling = Sampling(**options)
    rows = jnp.broadcast_to(LOGITS, (count, len(LOGITS)))
    return np.asarray(draw(rows, jnp.zeros(count, jnp.int32), sampling.mode, sampling.values(len(LOGITS))))


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, [0.4, 0.3, 0.2, 0.06, 0.04]),
        ({"top_k": 2}, [4 / 7, 3 / 7, 0, 0, 0]),
        ({"top_p": 0.65}, [4 / 7, 3 / 7, 0, 0, 0]),
        ({"top_p": 0.75}, [4 / 9, 3 / 9, 2 / 9, 0, 0]),
        ({"top_k": 3, "top_p": 0.6}, [4 / 7, 3 / 7, 0, 0, 0]),  # of the three tokens, two reach 0.6
        ({"top_p": 1.0}, [0.4, 0.3, 0.2, 0.06, 0.04]),
        ({"top_k": 100, "top_p": 1e-6}, [1, 0, 0, 0, 0]),
    ],
)
def test_frequencies_match_the_filtered_probabilities(options, wanted):
    shares = np.bincount(drawn(4000, temperature=1.0, **options), minlength=5) / 4000
    # Five standard deviations of a frequency over 4000 draws.
    np.testing.assert_allclose(shares, wanted, atol=5 * np.sqrt(0.25 / 4000))
    assert not shares[np.array(wanted) == 0].any()


def test_temperature_sharpens_and_flattens():
    squared = np.array([0.4, 0.3, 0.2, 0.06, 0.04]) ** 2
    shares = np.bincount(drawn(4000, temperature=0.5), minlength=5) / 4000
    np.testing.assert_allclose(shares, squared / squared.sum(), atol=5 * np.sqrt(0.25 / 4000))
    assert set(drawn(50, temperature=1e-3)) == {0}
    assert set(drawn(50)) == {0}


def test_tied_tokens_are_all_kept():
    assert likely(jnp.zeros((1, 4)), 2, 1.0).tolist() == [[0.0] * 4]


def test_rows_and_places_draw_independently_and_seeds_repeat():
    model = Decoder(vocab_size=64, num_layers=1, d_model=32, num_heads=8, d_ff=64)
    params = jax.tree.map(jnp.zeros_like, model.init(jax.random.key(0)))  # all tokens are equally likely
    generate = make_generator(model, length=24, vocab_size=50)
    weights = generate.load(params, num_rows=2)

    def tokens(seed):
        return [row.tolist() for row in generate(weights, [[1], [1]], 20, sampling=Sampling(1.0, seed=seed))]

    one = tokens(1)
    assert one == tokens(1) != tokens(2)
    assert one[0] != one[1]
    assert len(set(one[0])) > 8
    assert 40 < max(one[0] + one[1] + tokens(3)[0]) < 50  # the model has 64 tokens, the tokenizer 50


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"temperature": -1.0}, r"temperature=-1.0 is out of range"),
        ({"temperature": float("nan")}, r"temperature=nan is out of range"),
        ({"temperature": 1.0, "top_k": 0}, r"top_k must be at least 1; got 0"),
        ({"temperature": 1.0, "top_p": 1.5}, r"top_p must be above 0 and up to 1; got 1.5"),
        ({"top_k": 3}, r"no effect at temperature 0"),
        ({"seed": -1}, r"seed=-1 is out of range"),
    ],
)
def test_invalid_options_are_errors(options, text):
    with pytest.raises(mw.MeshwrightError, match=text):
        Sampling(**options)
