"""Text samples from a language model before and after training, drawn as `meshwright generate` draws them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax

from meshwright.generate.draw import Sampling
from meshwright.generate.generator import make_generator
from meshwright.generate.text import encode_prompts, generate_text
from meshwright.loop.results.before_after import BeforeAfter
from meshwright.train.padding import cut, part_leaves

if TYPE_CHECKING:
    from meshwright.loop.decisions import RunSetup

TEMPERATURE = 0.7
"""Sampling temperature; below 1, so that short training already shows."""


class TrainingSamples(BeforeAfter):
    """Text samples before and after training."""

    def __init__(self, setup: RunSetup) -> None:
        from meshwright.loop.text_source import TextSource

        assert isinstance(setup.source, TextSource)
        assert setup.model is not None
        self.options, self.tell, self.tokenizer = setup.config.run, setup.tell, setup.source.tokenizer
        (prompt,) = encode_prompts([self.options.prompt], self.tokenizer)
        lora, leaves = getattr(setup.job, "lora", None), part_leaves(setup.layout, "params")

        def whole(params: Any) -> Any:
            """Returns parameters without padding and adapters."""
            params = cut(params, leaves)
            return params if lora is None else lora.adapters.merged(params)

        is_plain = lora is None and not any(leaf.is_padded for leaf in leaves)
        self.whole = (lambda params: params) if is_plain else jax.jit(whole)
        self.generator = make_generator(
            setup.model,
            length=len(prompt) + self.options.sample_tokens,
            precision=setup.dtypes,
            vocab_size=self.tokenizer.vocab_size,
        )

    def show(self, state: Any, when: str) -> None:
        options, step = self.options, int(state.step)
        (sample,) = generate_text(
            self.generator,
            self.generator.load(self.whole(state.params)),
            self.tokenizer,
            [options.prompt],
            options.sample_tokens,
            sampling=Sampling(temperature=TEMPERATURE, seed=options.seed),
            ignore_end=True,
        )
        self.tell.log.event("sample", step, sample.text, prompt=options.prompt, when=when)
        text = options.prompt + printable(sample.text)
        lines = "\n".join(f"    {line}" for line in text.splitlines())
        self.tell(f"sample {when} training:\n{lines}")


def printable(text: str) -> str:
    """Returns a text without control characters, which could change a terminal.

    Example:
        >>> printable("a\\x1b[31m") == "a\N{MIDDLE DOT}[31m"
        True
    """
    return "".join(letter if letter.isprintable() or letter == "\n" else "\N{MIDDLE DOT}" for letter in text)
