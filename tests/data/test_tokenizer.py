"""The byte tokenizer and tokenizers from files: lossless, without truncation, with errors that name the place."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.data import load_tokenizer
from meshwright.errors import DataError


def write_tokenizer(path, *, special=("<unk>", "</s>"), truncation=None):
    """A tokenizer of whole words."""
    words = [*special, "a", "rose", "is", "."]
    content = {
        "version": "1.0",
        "truncation": truncation,
        "padding": None,
        "added_tokens": [
            {"id": place, "content": name, "special": True}
            | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            for place, name in enumerate(special)
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "WordLevel",
            "vocab": {word: place for place, word in enumerate(words)},
            "unk_token": "<unk>",
        },
    }
    path.write_text(json.dumps(content))
    return str(path)


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])))
def test_bytes_round_trip(text):
    tokenizer = load_tokenizer("bytes")
    ids = tokenizer.encode(text)
    assert ids.tolist() == list(text.encode())
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([*ids, tokenizer.end]) == text


def test_bytes_in_any_encoding_are_accepted():
    tokenizer = load_tokenizer("bytes")
    assert tokenizer.encode(b"\xff\xfe").tolist() == [255, 254]
    assert tokenizer.decode([255]) == "\ufffd"


def test_bytes_reject_text_they_cannot_encode():
    tokenizer = load_tokenizer("bytes")
    with pytest.raises(DataError, match=r"byte 2 is 0, which ends documents.*\nhint: select only text files"):
        tokenizer.encode(b"ab\0c")
    with pytest.raises(DataError, match="character 1 is half of a surrogate pair"):
        tokenizer.encode("a\ud800")
    with pytest.raises(DataError, match="byte ids must be from 0 to 255; got 3 to 256"):
        tokenizer.decode([3, 256])
    with pytest.raises(DataError, match="remove `end`"):
        load_tokenizer("bytes", end="</s>")


def test_a_file_of_tokenizers(tmp_path):
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "tokenizer.json"))
    assert (tokenizer.vocab_size, tokenizer.end) == (6, 1)
    assert tokenizer.encode("a rose is").tolist() == tokenizer.encode(b"a rose is").tolist() == [2, 3, 4]
    assert [ids.tolist() for ids in tokenizer.encode_all(["a", "", "rose ."])] == [[2], [], [3, 5]]
    assert tokenizer.decode(np.array([2, 3, 1])) == "a rose"


def test_truncation_in_a_tokenizer_file_is_ignored(tmp_path):
    cut = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "tokenizer.json", truncation=cut))
    assert tokenizer.encode("a rose is a rose").tolist() == [2, 3, 4, 2, 3]


def test_the_end_of_document_token(tmp_path):
    path = write_tokenizer(tmp_path / "tokenizer.json", special=("<unk>", "<stop>"))
    with pytest.raises(DataError, match=r"none of the common end-of-document tokens"):
        load_tokenizer(path)
    with pytest.raises(DataError, match=r"no token '<stpo>'.\nhint: did you mean '<stop>'\?"):
        load_tokenizer(path, end="<stpo>")
    assert load_tokenizer(path, end="<stop>").end == 1
    assert load_tokenizer(path, end="<stop>").fingerprint != load_tokenizer(path, end="a").fingerprint


def test_invalid_tokenizer_files_are_errors(tmp_path):
    with pytest.raises(DataError, match=r"no tokenizer 'byte'.\nhint: did you mean 'bytes'\?"):
        load_tokenizer("byte")
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(DataError, match="is not a tokenizer"):
        load_tokenizer(str(tmp_path / "other.json"))
    with pytest.raises(DataError, match=r"hint: did you mean 'other.json'\?"):
        load_tokenizer(str(tmp_path / "othr.json"))


def test_text_that_is_not_utf8(tmp_path):
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "tokenizer.json"))
    with pytest.raises(DataError, match=r'byte 2 \(0xff\) is not UTF-8.*\nhint: .*"bytes" tokenizer'):
        tokenizer.encode(b"a \xff")
