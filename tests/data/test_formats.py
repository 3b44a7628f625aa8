"""Parquet, Hugging Face datasets on disk, and packed token files: the documents of JSON lines, and clear errors."""

import json

import numpy as np
import pytest

from meshwright.data import Rows, Tokens, load_tokenizer, open_bin_tokens, open_documents, prepare_tokens
from meshwright.errors import DataError

TEXTS = [f"text number {number} " * (number % 5) + "ä" for number in range(50)]
BYTES = load_tokenizer("bytes")


def all_tokens(tokens):
    return tokens.read(0, tokens.num_tokens)


def write_dataset(folder, texts, *, num_files=2, state=None):
    """Writes a folder as `Dataset.save_to_disk` does: Arrow streams, and the names of the files in state.json."""
    pyarrow = pytest.importorskip("pyarrow")
    folder.mkdir(parents=True)
    names = [f"data-{number:05}-of-{num_files:05}.arrow" for number in range(num_files)]
    for number, name in enumerate(names):
        table = pyarrow.table({"id": list(range(len(texts[number::num_files]))), "text": texts[number::num_files]})
        with pyarrow.OSFile(str(folder / name), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=7)
    (folder / "dataset_info.json").write_text("{}")
    (folder / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": name} for name in names]} | (state or {}))
    )


# --- Columns ---


def test_parquet_has_the_documents_of_json_lines(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "texts.parquet"
    table = pyarrow.table({"id": list(range(50)), "body": TEXTS})
    parquet.write_table(table, path, row_group_size=8)
    documents = open_documents(str(path), text_field="body")
    assert [document.text() for document in documents.stream()] == TEXTS
    assert [documents[number] for number in (0, 49, 8, 7, 31)] == [TEXTS[number] for number in (0, 49, 8, 7, 31)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"body": text}) + "\n" for text in TEXTS))
    other = open_documents(str(tmp_path / "texts.jsonl"), text_field="body")
    found, expected = (all_tokens(prepare_tokens(each, BYTES, folder=tmp_path / "c")) for each in (documents, other))
    np.testing.assert_array_equal(found[0], expected[0])
    np.testing.assert_array_equal(found[1], expected[1])
    with pytest.raises(DataError, match=r"texts.parquet has no field 'bdy'.\nhint: did you mean 'body'"):
        list(open_documents(str(path), text_field="bdy").stream())
    with pytest.raises(DataError, match="row 0: field 'id' is a int, not a string"):
        open_documents(str(path), text_field="id")[0]
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DataError, match=r"cannot read .*texts.parquet"):
        open_documents(str(path), text_field="body")[0]


def test_a_saved_dataset(tmp_path):
    write_dataset(tmp_path / "set", TEXTS)
    documents = open_documents(str(tmp_path / "set"))
    assert [file.suffix for file in documents.files] == [".arrow", ".arrow"]
    expected = TEXTS[0::2] + TEXTS[1::2]
    assert [document.text() for document in documents.stream()] == expected == list(documents)

    (tmp_path / "splits").mkdir()
    (tmp_path / "splits" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(DataError, match=r"with the splits train, test.\nhint: pass one of them, e.g. .*splits/train"):
        open_documents(str(tmp_path / "splits"))
    write_dataset(tmp_path / "selected", TEXTS, state={"_indices_files": [{"filename": "indices.arrow"}]})
    with pytest.raises(DataError, match="selects rows by an index file"):
        open_documents(str(tmp_path / "selected"))
    write_dataset(tmp_path / "empty", TEXTS, state={"_data_files": []})
    with pytest.raises(DataError, match="has no data files"):
        open_documents(str(tmp_path / "empty"))
    (tmp_path / "set" / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(DataError, match=r"cannot read .*data-00001-of-00002.arrow: No such file"):
        list(open_documents(str(tmp_path / "set")).stream())
    (tmp_path / "damaged.arrow").write_bytes(b"ARROW1 and nothing else")
    with pytest.raises(DataError, match=r"cannot read .*damaged.arrow"):
        open_documents(str(tmp_path / "damaged.arrow"))[0]


def test_without_pyarrow(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    (tmp_path / "texts.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match=r"needs pyarrow.\nhint: run `pip install 'meshwright\[data\]'`"):
        len(open_documents(str(tmp_path / "texts.parquet")))


# --- Packed tokens ---


@pytest.mark.parametrize(("dtype", "header", "scanned"), [("uint16", 0, 7), ("uint32", 1024, 1 << 22)])
def test_packed_tokens_equal_tokenized_text(tmp_path, monkeypatch, dtype, header, scanned):
    monkeypatch.setattr("meshwright.data.formats.bin_tokens._SCANNED", scanned)
    documents = [[*BYTES.encode(text), 0] for text in TEXTS]
    paths = []
    for number, part in enumerate((documents[:20], documents[20:])):
        path = tmp_path / f"part{number}.bin"
        path.write_bytes(b"\7" * header + np.concatenate(part).astype(dtype).tobytes())
        (tmp_path / f"part{number}.bin.json").write_text(
            json.dumps({"dtype": dtype, "vocab_size": 256, "end": 0, "header_bytes": header})
        )
        paths.append(path)
    tokens = open_bin_tokens(paths, BYTES, folder=tmp_path / "cache")
    expected = Tokens.of(documents)
    for found, wanted in zip(all_tokens(tokens), all_tokens(expected), strict=True):
        np.testing.assert_array_equal(found, wanted)
    rows, wanted = Rows(tokens, 16), Rows(expected, 16)
    for number in range(len(wanted)):
        for name, values in wanted[number].items():
            np.testing.assert_array_equal(rows[number][name], values)
    # The second time, the ends of documents come from the cache; changed contents are found.
    assert open_bin_tokens(paths, BYTES, folder=tmp_path / "cache").fingerprint == tokens.fingerprint
    with paths[1].open("ab") as file:
        file.write(np.array([65], dtype).tobytes())
    longer = open_bin_tokens(paths, BYTES, folder=tmp_path / "cache")
    assert longer.fingerprint != tokens.fingerprint
    assert longer.num_documents == tokens.num_documents + 1


def test_wrong_packed_tokens(tmp_path):
    path, sidecar = tmp_path / "a.bin", tmp_path / "a.bin.json"
    np.array([1, 2, 300, 0], "<u2").tofile(path)

    def open_it(**facts):
        sidecar.write_text(json.dumps(facts))
        return open_bin_tokens(path, BYTES, folder=tmp_path / "cache")

    with pytest.raises(DataError, match=r"does not state its dtype.\nhint: pass --token-dtype uint16"):
        open_it()
    with pytest.raises(DataError, match="has the dtype 'int8'"):
        open_it(dtype="int8")
    with pytest.raises(DataError, match=r"unknown field 'vocab'.\nhint: did you mean 'vocab_size'"):
        open_it(dtype="uint16", vocab=256)
    with pytest.raises(DataError, match="a vocabulary of 50257 tokens; the tokenizer has 256"):
        open_it(dtype="uint16", vocab_size=50257)
    with pytest.raises(DataError, match="has token 300; the tokenizer has 256 tokens"):
        open_it(dtype="uint16")
    with pytest.raises(DataError, match="header_bytes is -1"):
        open_it(dtype="uint16", header_bytes=-1)
    with pytest.raises(DataError, match="8 bytes, 3 of them a header; the rest is not a number of uint16"):
        open_it(dtype="uint16", header_bytes=3)
    sidecar.write_text('{"dtype": "uint16"}')
    with pytest.raises(DataError, match="says uint16, but the options say uint32"):
        open_bin_tokens(path, BYTES, folder=tmp_path / "cache", dtype="uint32")
    sidecar.write_text("[]")
    with pytest.raises(DataError, match="is not an object"):
        open_bin_tokens(path, BYTES, folder=tmp_path / "cache")
    with pytest.raises(DataError, match=r"cannot read .*no.bin"):
        open_bin_tokens(tmp_path / "no.bin", BYTES, folder=tmp_path / "cache", dtype="uint16")
