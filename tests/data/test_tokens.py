"""Token streams, and their split for validation."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.data import Tokens
from meshwright.errors import DataError


def documents_of(tokens):
    ids, numbers = tokens.read(0, tokens.num_tokens)
    return [tuple(ids[numbers == number].tolist()) for number in range(tokens.num_documents)]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.data())
def test_any_part_of_a_stream_can_be_read(sizes, data):
    documents = [list(range(10 * n, 10 * n + size)) for n, size in enumerate(sizes)]
    tokens = Tokens.of(documents)
    whole = [token for document in documents for token in document]
    start = data.draw(st.integers(0, len(whole) - 1))
    stop = data.draw(st.integers(start + 1, len(whole)))
    ids, numbers = tokens.read(start, stop)
    assert ids.tolist() == whole[start:stop]
    assert numbers.tolist() == [token // 10 for token in whole[start:stop]]


@given(st.lists(st.integers(1, 9), min_size=2, max_size=60), st.sampled_from([0.02, 0.1, 0.5, 0.9]))
def test_a_split_is_by_whole_documents(sizes, share):
    documents = [tuple(range(10 * n, 10 * n + size)) for n, size in enumerate(sizes)]
    train, validation = Tokens.of(documents).split(share)
    left, right = documents_of(train), documents_of(validation)
    assert sorted(left + right) == documents
    assert left == sorted(left)
    assert right == sorted(right)
    assert left
    assert right
    # At most the share asked for, or the smallest document if that is already more.
    total = sum(sizes)
    assert validation.num_tokens <= max(share * total, min(sizes))
    assert validation.num_tokens > share * total - 9


def test_a_split_is_always_the_same_and_changes_the_fingerprint():
    tokens = Tokens.of([[n] for n in range(50)])
    (train, validation), again = tokens.split(0.2), tokens.split(0.2)
    assert [part.fingerprint for part in again] == [train.fingerprint, validation.fingerprint]
    assert len({tokens.fingerprint, train.fingerprint, validation.fingerprint}) == 3
    assert tokens.split(0.3)[0].fingerprint != train.fingerprint
    # Hard-coded, since resumed runs must hold back the same documents.
    assert [document[0] for document in documents_of(validation)] == [0, 3, 5, 7, 19, 33, 34, 42, 43, 44]


@pytest.mark.parametrize("place", [0, 3, 19, 100])
def test_a_document_that_is_too_large_does_not_spoil_the_split(place):
    documents = [[n] for n in range(100)]
    documents.insert(place, [1000] * 900)
    train, validation = Tokens.of(documents).split(0.05)
    assert (train.num_tokens, validation.num_tokens) == (950, 50)


def test_one_document_is_cut():
    train, validation = Tokens.of([list(range(10))]).split(0.2)
    assert documents_of(train) == [tuple(range(8))]
    assert documents_of(validation) == [(8, 9)]


def test_without_validation_everything_is_for_training():
    tokens = Tokens.of([[1, 2], [3]])
    train, validation = tokens.split(0)
    assert train is tokens
    assert (validation.num_tokens, validation.num_documents) == (0, 0)


def test_invalid_splits_are_errors():
    for share in (-0.1, 1, np.nan):
        with pytest.raises(DataError, match=r"validation must be in \[0, 1\); got"):
            Tokens.of([[1], [2]]).split(share)
    with pytest.raises(DataError, match="1 tokens cannot be split into two parts"):
        Tokens.of([[1]]).split(0.5)
    with pytest.raises(DataError, match="document 1 has no tokens"):
        Tokens.of([[1], []])
