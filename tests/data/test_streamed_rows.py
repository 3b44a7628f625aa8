"""Rows tokenized on the fly: those of the token cache, from any position, on any number of restarts."""

import itertools
import json

import numpy as np
import pytest

from meshwright.data import Ledger, Rows, Tokens, check_ledger, iterated_batches, load_tokenizer, open_documents
from meshwright.data.streamed_rows import StreamedRows, stream_rows
from meshwright.errors import DataError

BYTES = load_tokenizer("bytes")


@pytest.fixture
def documents(tmp_path):
    """Documents of 0 to 60 bytes, some shorter than a row and some longer than two."""
    sizes = np.random.default_rng(0).integers(0, 60, 40)
    lines = [json.dumps({"text": chr(65 + n % 26) * int(size)}) for n, size in enumerate(sizes)]
    (tmp_path / "texts.jsonl").write_text("\n".join(lines))
    return open_documents(str(tmp_path / "texts.jsonl"))


def stream(documents, seed=5):
    return StreamedRows(documents, BYTES, 16, numbers=np.arange(len(documents)), seed=seed)


def test_streamed_rows_are_those_of_packed_tokens(documents):
    iterator = stream(documents)
    order = [int(iterator._order[place]) for place in range(len(documents))]
    texts = [[*BYTES.encode(documents[number]), 0] for number in order if documents[number]]
    expected = Rows(Tokens.of(texts), 16)
    found = list(iterator)
    assert len(found) == len(expected)
    for row, wanted in zip(found, [expected[number] for number in range(len(expected))], strict=True):
        for name, values in wanted.items():
            np.testing.assert_array_equal(row[name], values, err_msg=name)
            assert row[name].dtype == values.dtype
    assert [row["inputs"].tolist() for row in stream(documents, seed=6)] != [row["inputs"].tolist() for row in found]


def test_every_position_resumes_exactly(documents):
    whole = list(stream(documents))
    iterator = stream(documents)
    for place in range(len(whole) + 1):
        again = stream(documents)
        again.set_state(json.loads(json.dumps(iterator.get_state())))
        rest = list(itertools.islice(again, 3))
        assert [row["targets"].tolist() for row in rest] == [
            row["targets"].tolist() for row in whole[place : place + 3]
        ]
        next(iterator, None)


def test_batches_resume_and_epochs_differ(desk, documents, tmp_path):
    rows = stream_rows(documents, BYTES, 16, batch_size=8, seed=1)
    options = {"batch_size": 8, "shardings": desk.meshes["dp:8"], "seed": 1, "epochs": 3}
    with iterated_batches(rows, **options) as batches:
        whole = [np.asarray(batch.arrays["targets"]).tolist() for batch in batches]
    found, state = [], None
    for count in (1, 4, 2, 100):
        with (
            Ledger(tmp_path / "ledger") as ledger,
            iterated_batches(rows, **options, state=state, ledger=ledger, first_step=len(found) + 1) as batches,
        ):
            found += [np.asarray(batch.arrays["targets"]).tolist() for batch in itertools.islice(batches, count)]
            state = json.loads(json.dumps(batches.state))
    assert found == whole
    check_ledger(tmp_path / "ledger").require()


def test_held_out_documents_are_in_no_training_row(documents):
    parts = [
        stream_rows(documents, BYTES, 16, batch_size=4, validation=0.3, held_out=held_out) for held_out in (False, True)
    ]
    counts = [sum(int((row["targets"] == 0).sum()) for row in part.open(0, 0)) for part in parts]
    assert min(counts) > 5
    assert parts[0].fingerprint != parts[1].fingerprint
    with pytest.raises(DataError, match="has no documents for evaluation"):
        stream_rows(documents, BYTES, 16, batch_size=4, validation=0.0, held_out=True)
