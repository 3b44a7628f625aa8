"""An adapter for lm-eval-harness (the `lm-eval` package, an extra): a run as a model that it can evaluate."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from meshwright.errors import ConfigError, MeshwrightError
from meshwright.generate.draw import Sampling
from meshwright.generate.generator import Generator, make_generator
from meshwright.generate.text import encode_prompts, generate_text
from meshwright.loop.results.saved_run import SavedRun, WhichWeights, mesh_to_use, open_run, precision_to_use


class RunAnswers:
    """The answers of a run to the three kinds of requests of lm-eval-harness.

    Args:
        length: maximum number of tokens of a row; longer texts lose their beginning.
        batch_size: number of requests per batch.
        weights: which parameters of the run; see `SavedRun.restore`.
    """

    def __init__(
        self,
        saved: SavedRun,
        mesh: Mesh,
        *,
        length: int | None = None,
        batch_size: int = 8,
        precision: str = "auto",
        weights: WhichWeights = "auto",
    ) -> None:
        self.saved, self.batch_size = saved, batch_size
        self.length = length or saved.config.data.num_tokens
        self.generator: Generator = make_generator(
            saved.model,
            length=self.length,
            precision=precision_to_use(precision),
            vocab_size=saved.tokenizer.vocab_size,
        )
        params, self.step, _ = saved.restore(mesh, weights=weights)
        self.weights = self.generator.load(params, num_rows=batch_size)

    def loglikelihood(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """Returns the log probability of each continuation of a context, and whether it is the greedy one."""
        rows, counts = [], []
        for context, continuation in pairs:
            before = self._encode(context) if context else np.array([self.saved.tokenizer.end], np.int32)
            # Encode both together, as the tokens at the border may depend on each other.
            whole = self._encode(context + continuation) if context else self._encode(continuation)
            after = whole[len(before) :] if context else whole
            if context and not np.array_equal(whole[: len(before)], before):
                after = self._encode(continuation)
            if not len(after):
                raise MeshwrightError(f"the continuation {continuation!r} has no tokens.", hint="leave it out.")
            after = after[-(self.length - 1) :]
            rows.append(np.concatenate([before, after])[-self.length :])
            counts.append(len(after))
        found = [scores for part in self._batches(rows) for scores in self.generator.score(self.weights, part)]
        return [
            (float(scores.log_probs[-count:].sum()), bool(scores.is_likeliest[-count:].all()))
            for scores, count in zip(found, counts, strict=True)
        ]

    def loglikelihood_rolling(self, texts: Sequence[str]) -> list[float]:
        """Returns the log probability of each text, in rows of `length` tokens whose contexts do not overlap."""
        found = []
        for text in texts:
            ids = np.concatenate([[self.saved.tokenizer.end], self._encode(text)]).astype(np.int32)
            size = self.length - 1
            rows = [ids[start : start + size + 1] for start in range(0, len(ids) - 1, size)]
            scores = [one for part in self._batches(rows) for one in self.generator.score(self.weights, part)]
            found.append(float(sum(one.log_probs.sum() for one in scores)))
        return found

    def generate_until(self, requests: Sequence[tuple[str, dict[str, Any]]]) -> list[str]:
        """Returns the text after each context, up to a stop string."""
        found: dict[int, str] = {}
        order = sorted(range(len(requests)), key=lambda n: repr(requests[n][1]))
        for _, numbers in itertools.groupby(order, key=lambda n: repr(requests[n][1])):
            for part in self._batches(list(numbers)):
                texts = self._texts([requests[n][0] for n in part], requests[part[0]][1])
                found |= dict(zip(part, texts, strict=True))
        return [found[n] for n in range(len(requests))]

    def _texts(self, contexts: Sequence[str], options: Mapping[str, Any]) -> list[str]:
        """Returns the texts after contexts with the same options; long contexts lose their beginning."""
        until, tokenizer = options.get("until") or (), self.saved.tokenizer
        num_tokens = min(int(options.get("max_gen_toks", self.length // 2)), self.length - 1)
        temperature = float(options.get("temperature", 0.0)) if options.get("do_sample") else 0.0
        most = self.length - num_tokens
        rows = zip(contexts, encode_prompts(contexts, tokenizer), strict=True)
        results = generate_text(
            self.generator,
            self.weights,
            tokenizer,
            [text if len(row) <= most else tokenizer.decode(row[-most:]) for text, row in rows],
            num_tokens,
            sampling=Sampling(temperature=temperature),
            stop=[until] if isinstance(until, str) else list(until),
        )
        return [result.text for result in results]

    def _encode(self, text: str) -> np.ndarray:
        return np.asarray(self.saved.tokenizer.encode(text), np.int32)

    def _batches(self, rows: list[Any]) -> list[list[Any]]:
        return [rows[start : start + self.batch_size] for start in range(0, len(rows), self.batch_size)]


def harness_model(
    run: str | os.PathLike[str],
    *,
    step: int | None = None,
    mesh: str | None = None,
    length: int | None = None,
    batch_size: int = 8,
    precision: str = "auto",
    weights: WhichWeights = "auto",
) -> Any:
    """Returns a run as an `lm_eval.api.model.LM`.

    Args:
        run: run folder.
        step: step of the checkpoint (default: the last good one).
        mesh: mesh such as tp:4 (default: all accelerators that can split the heads; one CPU device).
        length: maximum number of tokens of a context and its continuation (default: that of the run's rows).
        weights: "ema" (the moving average of a run with `--ema`), "last", or "auto": the average if there is one.

    Example:
        >>> harness_model("nowhere")
        Traceback (most recent call last):
        ...
        meshwright.errors.ConfigError: 'nowhere' holds no run...
    """
    saved = open_run(run, step=step)
    try:
        from lm_eval.api.model import LM
    except ModuleNotFoundError:
        raise ConfigError("lm-eval-harness is not installed.", hint="run `pip install lm-eval`.") from None
    placed = mesh_to_use(saved.model, mesh)
    options: Any = {"length": length, "batch_size": batch_size, "precision": precision, "weights": weights}
    answers = RunAnswers(saved, placed, **options)

    class RunModel(LM):  # type: ignore[misc]  # the package has no types
        """A run of Meshwright."""

        def loglikelihood(self, requests: Any) -> list[tuple[float, bool]]:
            return answers.loglikelihood([request.args for request in requests])

        def loglikelihood_rolling(self, requests: Any) -> list[float]:
            return answers.loglikelihood_rolling([request.args[0] for request in requests])

        def generate_until(self, requests: Any) -> list[str]:
            return answers.generate_until([request.args for request in requests])

    return RunModel()
