"""Text from tokens: stop strings, ends of documents, and pieces as they arrive."""

import numpy as np
import pytest

import meshwright as mw
from meshwright.data import load_tokenizer
from meshwright.generate.text import generate_text

TOKENIZER = load_tokenizer("bytes")


class Scripted:
    """A generator that gives prepared texts, some bytes at a time."""

    def __init__(self, *texts, chunk):
        self.texts, self.chunk, self.finished = [text.encode() for text in texts], chunk, []

    def stream(self, weights, prompts, num_tokens, *, sampling, stop_tokens):
        self.prompts, done = [list(prompt) for prompt in prompts], set()

        class Parts:
            def finish(_, row):
                self.finished.append(row)
                done.add(row)

            def __iter__(_):
                for start in range(0, num_tokens, self.chunk):
                    stop = min(start + self.chunk, num_tokens)
                    yield [np.frombuffer(b"" if n in done else text[start:stop], np.uint8).astype(np.int32)
                           for n, text in enumerate(self.texts)]  # fmt: skip

        return Parts()


def run(*texts, chunk=3, prompts=None, **options):
    pieces = [[] for _ in texts]
    generator = Scripted(*texts, chunk=chunk)
    found = generate_text(
        generator, None, TOKENIZER, prompts or [""] * len(texts), 40, on_text=lambda n, text: pieces[n].append(text),
        **options,
    )  # fmt: skip
    return found, pieces, generator


@pytest.mark.parametrize("chunk", [1, 3, 40])
def test_pieces_are_the_text(chunk):
    found, pieces, _ = run("abcdefgh", "xyz", chunk=chunk)
    assert [one.text for one in found] == ["abcdefgh", "xyz"] == ["".join(piece) for piece in pieces]
    assert {one.why for one in found} == {"length"}


@pytest.mark.parametrize("chunk", [1, 2, 40])
def test_a_stop_string_ends_its_row_and_never_shows(chunk):
    found, pieces, generator = run("one\n\ntwo", "on\nly one", stop=["\n\n", "zzz"], chunk=chunk)
    assert [one.text for one in found] == ["one", "on\nly one"] == ["".join(piece) for piece in pieces]
    assert [one.why for one in found] == ["stop", "length"]
    assert generator.finished == [0]


@pytest.mark.parametrize("chunk", [1, 3])
def test_characters_are_shown_whole(chunk):
    _, pieces, _ = run("ä€𝄞!", chunk=chunk)
    assert "".join(pieces[0]) == "ä€𝄞!"
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces[0])


def test_the_end_of_a_document_ends_its_row():
    found, _, generator = run("ab\0", "abcd", chunk=3)
    assert [(one.text, one.why) for one in found] == [("ab", "end"), ("abcd", "length")]
    assert found[0].tokens == (97, 98, 0)
    assert generator.finished == [0]
    assert run("ab\0cd", chunk=5, ignore_end=True)[0][0].text == "abcd"


def test_an_empty_prompt_starts_a_document():
    assert run("a", "b", prompts=["", "hi"])[2].prompts == [[0], [104, 105]]


def test_an_empty_stop_string_is_an_error():
    with pytest.raises(mw.MeshwrightError, match="a stop string is empty"):
        run("a", stop=[""])
