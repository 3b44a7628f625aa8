"""Streams of Parquet files: every document once, each row group decoded once, and an exact position."""

import itertools

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from meshwright.data import Documents, load_tokenizer, stream_rows
from meshwright.data.formats.columns import ParquetFile


@pytest.fixture
def documents(tmp_path):
    """Two Parquet files with row groups of 5 documents, and a text file between them."""
    for name, first in (("a.parquet", 0), ("c.parquet", 22)):
        texts = [f"document {number}" for number in range(first, first + 22)]
        pq.write_table(pa.table({"text": texts}), tmp_path / name, row_group_size=5)
    (tmp_path / "b.txt").write_text("a text file")
    return Documents(sorted(tmp_path.iterdir()))


def rows_of(documents, **options):
    return stream_rows(documents, load_tokenizer("bytes"), 8, batch_size=2, **options)


def texts_of(rows):
    ids = np.concatenate([row["inputs"][row["segment_ids"] > 0] for row in rows])
    return bytes(ids.astype(np.uint8)).split(b"\0")


def test_groups_stay_together_and_are_decoded_once(documents, monkeypatch):
    assert documents.group_ends() == [5, 10, 15, 20, 22, 23, 28, 33, 38, 43, 45]
    decoded, real = [], ParquetFile._group.__wrapped__
    seen = {}

    def group(self, number):
        if seen.get("last") != (self.path, number):
            decoded.append((self.path.name, number))
            seen["last"] = (self.path, number)
        return real(self, number)

    monkeypatch.setattr(ParquetFile, "_group", group)
    orders = []
    for epoch in (0, 1):
        rows = rows_of(documents)  # reads the first row
        decoded.clear()
        seen.clear()
        texts = texts_of(rows.open(seed=3, epoch=epoch))
        # The last document ends without a target.
        assert sorted(texts) == sorted([*(b"document %d" % n for n in range(44)), b"a text file"])
        assert len(decoded) == len(set(decoded)) == 10
        orders.append(texts)
    assert orders[0] != orders[1]
    numbers = [int(text.split()[-1]) for text in orders[0] if text.startswith(b"document")]
    groups = [(number // 22, number % 22 // 5) for number in numbers]
    together = [group for group, _ in itertools.groupby(groups)]
    assert len(together) == 10
    assert together != sorted(together)
    assert numbers[:5] != sorted(numbers[:5])


def test_a_position_continues_with_the_exact_row(documents):
    iterator = rows_of(documents, validation=0.2).open(seed=1, epoch=0)
    for _ in range(7):
        next(iterator)
    saved, rest = iterator.get_state(), list(iterator)
    again = rows_of(documents, validation=0.2).open(seed=1, epoch=0)
    again.set_state(saved)
    for one, two in zip(rest, again, strict=True):
        np.testing.assert_array_equal(one["inputs"], two["inputs"])
    assert len(rest) > 20


def test_files_without_groups_keep_their_order(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n{"text": "y"}\n')
    assert Documents([tmp_path / "a.jsonl"]).group_ends() is None
