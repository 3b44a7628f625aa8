"""Packing: every token is a target exactly once, except the first of each document; boundaries are marked."""

import jax
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import meshwright as mw
from meshwright.data import Rows, Tokens
from meshwright.errors import DataError
from meshwright.models import Decoder
from meshwright.train import init_state, language_job, make_eval_step, state_layout


def numbered(sizes):
    """Documents whose tokens are all different: 1, 2, 3 and so on."""
    ends = np.cumsum(sizes)
    return [list(range(end - size + 1, end + 1)) for end, size in zip(ends, sizes, strict=True)]


@given(st.lists(st.integers(1, 30), min_size=1, max_size=20), st.integers(1, 40))
def test_every_token_but_the_first_of_a_document_is_a_target_once(sizes, num_tokens):
    documents = numbered(sizes)
    if sum(sizes) < 2:
        return
    rows = Rows(Tokens.of(documents), num_tokens)
    targets = []
    for row in (rows[place] for place in range(len(rows))):
        assert {name: (values.dtype, values.shape) for name, values in row.items()} == {
            "inputs": (np.int32, (num_tokens,)),
            "targets": (np.int32, (num_tokens,)),
            "weights": (np.float32, (num_tokens,)),
            "segment_ids": (np.int32, (num_tokens,)),
        }
        counts = row["weights"] == 1
        assert set(row["weights"].tolist()) <= {0.0, 1.0}
        # A target with weight 1 follows its input in the same document.
        np.testing.assert_array_equal(row["targets"][counts], row["inputs"][counts] + 1)
        targets += row["targets"][counts].tolist()
    assert targets == [token for document in documents for token in document[1:]]


@given(st.lists(st.integers(1, 30), min_size=1, max_size=20), st.integers(1, 40))
def test_segments_are_documents(sizes, num_tokens):
    documents = numbered(sizes)
    if sum(sizes) < 2:
        return
    rows = Rows(Tokens.of(documents), num_tokens)
    document_of = {token: number for number, document in enumerate(documents) for token in document}
    inputs = []
    for place in range(len(rows)):
        row = rows[place]
        real = row["segment_ids"] > 0
        inputs += row["inputs"][real].tolist()
        numbers = np.array([document_of[token] for token in row["inputs"][real].tolist()])
        # Segments count from 1 in each row.
        np.testing.assert_array_equal(row["segment_ids"][real], numbers - numbers[0] + 1)
        # Padding is all zeros, at the end of the last row.
        assert real.all() or place == len(rows) - 1
        assert not (np.diff(real.astype(int)) > 0).any()
        for values in row.values():
            assert not values[~real].any()
    # All tokens but the last are inputs.
    assert inputs == list(range(1, sum(sizes)))


@given(st.lists(st.integers(1, 30), min_size=1, max_size=20), st.integers(1, 40))
def test_the_most_segments_of_a_row_are_known(sizes, num_tokens):
    if sum(sizes) < 2:
        return
    rows = Rows(Tokens.of(numbered(sizes)), num_tokens)
    assert rows.most_segments == max(len(set(rows[place]["segment_ids"].tolist())) for place in range(len(rows)))


def test_the_last_row_is_padded():
    rows = Rows(Tokens.of([[5, 6, 0], [7, 8, 9, 0]]), 4)
    assert len(rows) == 2
    assert {name: values.tolist() for name, values in rows[1].items()} == {
        "inputs": [8, 9, 0, 0],
        "targets": [9, 0, 0, 0],
        "weights": [1, 1, 0, 0],
        "segment_ids": [1, 1, 0, 0],
    }
    for place in (-1, 2):
        with pytest.raises(IndexError, match=f"row {place} of 2"):
            rows[place]


def test_rows_that_end_with_the_stream_need_no_padding():
    rows = Rows(Tokens.of([[1, 2, 3, 4, 5]]), 2)
    assert len(rows) == 2
    assert rows[1]["targets"].tolist() == [4, 5]


def test_fingerprints_depend_on_the_row_length():
    tokens = Tokens.of([[1, 2, 3, 4, 5]])
    assert len({Rows(tokens, 2).fingerprint, Rows(tokens, 3).fingerprint, tokens.fingerprint}) == 3


def test_invalid_rows_are_errors():
    with pytest.raises(DataError, match="the data is empty: it has 1 tokens"):
        Rows(Tokens.of([[0]]), 4)
    with pytest.raises(DataError, match="the data is empty: it has 0 tokens"):
        Rows(Tokens.of([[1, 2], [3]]).split(0)[1], 4)
    with pytest.raises(DataError, match="num_tokens must be at least 1; got 0"):
        Rows(Tokens.of([[1, 2]]), 0)
    with pytest.raises(DataError, match=r"the data has token 64; .* has 64 tokens, 0 to 63.\nhint: .* vocab_size=65"):
        Rows(Tokens.of([[1, 64]]), 4, vocab_size=64)
    assert len(Rows(Tokens.of([[1, 64]]), 4, vocab_size=65)) == 1


def test_the_loss_of_packed_rows_equals_that_of_separate_documents():
    """A model computes the same on packed rows as on one document per row."""
    documents = [[3, 5, 9, 2, 0], [7, 7, 1, 0], [4, 0]]
    packed = [Rows(Tokens.of(documents), 10)[0]]
    alone = [Rows(Tokens.of([document]), 10)[0] for document in documents]
    model = Decoder(vocab_size=16, num_layers=1, d_model=16, num_heads=2, d_ff=32)
    mesh = mw.create_mesh("dp:1", devices=1)
    results = []
    for rows in (packed, alone):
        job = language_job(model, batch_size=len(rows), num_tokens=10, packed=True)
        batch = jax.tree.map(lambda *leaves: np.stack(leaves), *rows)
        assert {name: (leaf.shape, leaf.dtype) for name, leaf in batch.items()} == {
            name: (leaf.shape, leaf.dtype) for name, leaf in job.batch.items()
        }
        layout = state_layout(job, optax.sgd(0.1), mesh)
        state = init_state(job, optax.sgd(0.1), layout, jax.random.key(0))
        results.append(make_eval_step(job, layout)(state, batch))
    assert [int(result["tokens"]) for result in results] == [8, 8]
    np.testing.assert_allclose(results[0]["loss"], results[1]["loss"], rtol=1e-5)
