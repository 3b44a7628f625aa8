"""Generating text: prompts are encoded, tokens are decoded as they arrive, and stop strings end a row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from meshwright.data.tokenizer import Tokenizer
from meshwright.errors import MeshwrightError
from meshwright.generate.draw import Sampling
from meshwright.generate.generator import Generator
from meshwright.generate.loaded_weights import Weights

_CUT = "\N{REPLACEMENT CHARACTER}"  # how a tokenizer decodes the first bytes of a character


@dataclass(frozen=True)
class Completion:
    """The text after a prompt.

    Args:
        tokens: all generated tokens, including the end-of-document token and those of a stop string.
        why: reason for the end: "length" (the maximum number of tokens), "end" (end of document) or "stop" (stop
            string, which `text` does not contain).
    """

    prompt: str
    text: str
    tokens: tuple[int, ...]
    why: Literal["length", "end", "stop"]


def encode_prompts(prompts: Sequence[str], tokenizer: Tokenizer) -> list[np.ndarray]:
    """Returns the tokens of each prompt; an empty prompt is the end of the document before.

    Example:
        >>> from meshwright.data import load_tokenizer
        >>> [ids.tolist() for ids in encode_prompts(["hi", ""], load_tokenizer("bytes"))]
        [[104, 105], [0]]
    """
    encoded = [np.asarray(tokenizer.encode(prompt), np.int32) for prompt in prompts]
    return [ids if len(ids) else np.array([tokenizer.end], np.int32) for ids in encoded]


def generate_text(
    generator: Generator,
    weights: Weights,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    num_tokens: int,
    *,
    sampling: Sampling | None = None,
    stop: Sequence[str] = (),
    ignore_end: bool = False,
    on_text: Callable[[int, str], Any] | None = None,
) -> list[Completion]:
    """Returns the text after each prompt.

    Args:
        stop: strings that end a row; the text ends before them.
        ignore_end: whether rows continue after the end-of-document token.
        on_text: called with a row and its new text as it arrives, without text that may belong to a stop string.

    Example:
        >>> import jax
        >>> from meshwright.data import load_tokenizer
        >>> from meshwright.generate import make_generator
        >>> from meshwright.models import Decoder
        >>> model = Decoder.named("tiny")
        >>> generate = make_generator(model, length=16)
        >>> weights = generate.load(model.init(jax.random.key(0)))
        >>> found = generate_text(generate, weights, load_tokenizer("bytes"), ["once"], 8, ignore_end=True)
        >>> len(found[0].tokens), found[0].why
        (8, 'length')
    """
    if any(not text for text in stop):
        raise MeshwrightError("a stop string is empty.", hint="pass text, e.g. --stop '\\n\\n'.")
    rows = [_Row(tokenizer, tuple(stop)) for _ in prompts]
    ends = () if ignore_end else (tokenizer.end,)
    encoded = encode_prompts(prompts, tokenizer)
    stream = generator.stream(weights, encoded, num_tokens, sampling=sampling, stop_tokens=ends)
    for part in stream:
        for number, (row, new) in enumerate(zip(rows, part, strict=True)):
            if row.why == "stop" or not len(new):
                continue
            fresh = row.add(new.tolist(), ends)
            if row.why != "length":
                stream.finish(number)
            if fresh and on_text is not None:
                on_text(number, fresh)
    if on_text is not None:
        for number, row in enumerate(rows):
            if rest := row.text[row.shown :]:
                on_text(number, rest)
    return [Completion(prompt, row.text, tuple(row.tokens), row.why) for prompt, row in zip(prompts, rows, strict=True)]


class _Row:
    """The text of one row so far."""

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...]) -> None:
        self.tokenizer, self.stop = tokenizer, stop
        self.tokens: list[int] = []
        self.text, self.shown = "", 0
        self.why: Literal["length", "end", "stop"] = "length"

    def add(self, new: list[int], ends: tuple[int, ...]) -> str:
        """Adds tokens and returns the new text that can be shown."""
        self.tokens += new
        text = self.tokenizer.decode(self.tokens)
        places = [place for stop in self.stop if (place := text.find(stop)) >= 0]
        if places:
            self.text, self.why = text[: min(places)], "stop"
            ready = len(self.text)
        else:
            self.text = text
            if self.tokens[-1] in ends:
                self.why = "end"
            ready = len(text) if self.why == "end" else len(text) - self._held(text)
        ready = max(ready, self.shown)
        fresh, self.shown = self.text[self.shown : ready], ready
        return fresh

    def _held(self, text: str) -> int:
        """Returns the number of last characters that the next tokens may change or complete to a stop string."""
        cut = len(text) - len(text.rstrip(_CUT))
        body = text[: len(text) - cut]
        starts = [size for stop in self.stop for size in range(1, len(stop)) if body.endswith(stop[:size])]
        return cut + max(starts, default=0)
