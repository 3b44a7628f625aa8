"""Documents from every kind of file, and errors for unreadable ones."""

import json

import pytest

from meshwright.data import open_documents
from meshwright.errors import DataError


def write_records(path, records):
    from array_record.python.array_record_module import ArrayRecordWriter

    writer = ArrayRecordWriter(str(path), "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()


def test_text_files_folders_and_globs(tmp_path):
    for name, text in {
        "b.txt": "two",
        "a.txt": "one",
        "sub/c.md": "three",
        ".hidden": "x",
        "__pycache__/d": "y",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert list(open_documents(str(tmp_path))) == [b"one", b"two", b"three"]
    assert list(open_documents(str(tmp_path / "*.txt"))) == [b"one", b"two"]
    assert list(open_documents(str(tmp_path / "**/*.md"))) == [b"three"]
    documents = open_documents(str(tmp_path / "a.txt"))
    assert (len(documents), documents[-1]) == (1, b"one")
    with pytest.raises(IndexError, match="document 1 of 1"):
        documents[1]


def test_lines_of_json(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "one"}\r\n\n{"text": "t\\u00fc\\nr", "id": 2}\n\r\n{"text": ""}')
    documents = open_documents(str(path))
    assert list(documents) == ["one", "tü\nr", ""]
    assert [document.text() for document in documents.stream()] == list(documents)
    assert [document.where for document in documents.stream()] == [f"{path}, line {n}" for n in (1, 3, 5)]
    path.write_text(json.dumps({"body": "x"}))
    assert open_documents(str(path), text_field="body")[0] == "x"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            '{"text": "a"',
            r"line 2 is not JSON: Expecting ',' delimiter at column 13.\nhint: write one complete object per line",
        ),
        ('{"texts": "a"}', r"line 2 has no field 'text'.\nhint: did you mean 'texts'\?"),
        ('{"id": 1}', r"line 2 has no field 'text'.\nhint: set the text field to one of: 'id'."),
        ("{}", r"line 2 has no field 'text'.$"),
        ("[1]", "line 2 is a list, not an object"),
        ('{"text": 3}', "line 2: field 'text' is a int, not a string"),
    ],
)
def test_malformed_lines_are_errors(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"text": "fine"}}\n{line}\n')
    with pytest.raises(DataError, match=message):
        [document.text() for document in open_documents(str(path)).stream()]
    with pytest.raises(DataError, match=f"{path}, document 1"):
        open_documents(str(path))[1]


def test_a_line_that_is_not_utf8(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "\xff"}\n')
    with pytest.raises(DataError, match="line 1: byte 10 is not UTF-8"):
        next(open_documents(str(path)).stream()).text()


@pytest.mark.parametrize("suffix", ["array_record", "arrayrecord"])
def test_array_records(tmp_path, suffix):
    write_records(tmp_path / f"a.{suffix}", [b"one", "zwölf".encode()])
    (tmp_path / "b.txt").write_text("text")
    documents = open_documents(str(tmp_path))
    assert list(documents) == [b"one", "zwölf".encode(), b"text"]
    assert [document.text() for document in documents.stream()] == list(documents)
    (tmp_path / f"a.{suffix}").write_bytes(b"nothing of the kind")
    with pytest.raises(DataError, match=f"cannot read .*a.{suffix} as ArrayRecord"):
        len(open_documents(str(tmp_path)))


def test_the_standard_library():
    documents = open_documents()
    names = [file.name for file in documents.files]
    assert {"argparse.py", "ast.py", "dataclasses.py"} <= set(names)
    assert list(documents.files) == sorted(documents.files, key=lambda file: file.parts)
    parts = {part for file in documents.files for part in file.parts}
    assert not parts & {"test", "tests", "site-packages", "dist-packages", "idlelib", "__pycache__"}
    assert 3e6 < sum(file.stat().st_size for file in documents.files) < 2e7


def test_no_file_matches(tmp_path):
    (tmp_path / "corpus").mkdir()
    with pytest.raises(DataError, match=r"the folder .* has no files"):
        open_documents(str(tmp_path / "corpus"))
    (tmp_path / "corpus" / "shakespeare.txt").write_text("x")
    with pytest.raises(DataError, match=r"no file matches .*\nhint: did you mean 'shakespeare.txt'\? \(in the folder"):
        open_documents(str(tmp_path / "corpus" / "shakespear.txt"))
    with pytest.raises(DataError, match=r"hint: did you mean 'corpus'\?"):
        open_documents(str(tmp_path / "corpsu" / "shakespeare.txt"))
    with pytest.raises(DataError, match=r"corpus' has shakespeare.txt."):
        open_documents(str(tmp_path / "corpus" / "*.jsonl"))


def test_a_missing_file_is_an_error(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    documents = open_documents(str(tmp_path / "a.txt"))
    (tmp_path / "a.txt").unlink()
    with pytest.raises(DataError, match=r"cannot read .*a.txt: No such file"):
        documents[0]


def test_fingerprints_depend_on_contents(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.txt").write_text("two")
    before = open_documents(str(tmp_path)).fingerprint
    (tmp_path / "a.txt").rename(tmp_path / "Another.txt")
    assert open_documents(str(tmp_path)).fingerprint == before
    (tmp_path / "b.txt").write_text("twO")
    assert open_documents(str(tmp_path)).fingerprint != before
    # The boundary between two files counts.
    (tmp_path / "Another.txt").write_text("onet")
    (tmp_path / "b.txt").write_text("wo")
    assert open_documents(str(tmp_path)).fingerprint != before


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("", "is empty"),
        ("x" * 300, "File name too long"),
        ("a\0b", "no file matches|null byte"),
        ("x" * 300 + "/*.txt", "no file matches|long"),
    ],
)
def test_invalid_paths_are_errors(path, message):
    with pytest.raises(DataError, match=message):
        open_documents(path)
