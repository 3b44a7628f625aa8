"""Checks that a model folder computes the logits it should: those of transformers, or some stored earlier.

A fingerprint is a small file beside the weights: a fixed sequence of tokens, and some of the logits after it. It lets a
machine without transformers check a folder, or the code that reads it.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.checkpoint.convert.config_json import read_model_json
from meshwright.checkpoint.convert.pretrained import read_pretrained
from meshwright.errors import CheckpointError
from meshwright.files import write_atomically
from meshwright.models import Decoder
from meshwright.types import PyTree

FINGERPRINT = "meshwright_logits.json"
NUM_TOKENS, NUM_POSITIONS, NUM_IDS = 48, 6, 16
TOLERANCE = 1e-4
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class CheckResult:
    """The outcome of `check_pretrained`.

    Args:
        against: the source of the other logits.
        difference: largest difference of a logit, relative to the largest logit.
    """

    against: str
    difference: float
    tolerance: float
    notes: list[str]

    @property
    def is_same(self) -> bool:
        return self.difference <= self.tolerance  # False for NaN


def probe_tokens(vocab_size: int) -> Array:
    """Returns the fixed sequence of tokens for a vocabulary.

    Example:
        >>> probe_tokens(1000)[:5].tolist()
        [7, 55, 165, 337, 571]
    """
    places = np.arange(NUM_TOKENS, dtype=np.int64)
    return np.asarray((31 * places**2 + 17 * places + 7) % vocab_size, np.int32)


def model_logits(model: Decoder, params: PyTree, tokens: Array) -> Array:
    """Returns the logits `[S, V]` of a row of tokens, with matmuls in full float32.

    Example:
        >>> model = Decoder.named("tiny")
        >>> model_logits(model, model.init(jax.random.key(0)), probe_tokens(256)).shape
        (48, 256)
    """
    with jax.default_matmul_precision("highest"):
        logits = jax.jit(model.apply)(params, jnp.asarray(tokens)[None])
    found: Array = np.asarray(logits)[0]
    return found


def make_fingerprint(tokens: Array, logits: Array, *, source: str) -> dict[str, Any]:
    """Returns some of the logits of a row of tokens, as JSON.

    Example:
        >>> made = make_fingerprint(probe_tokens(8), np.ones((48, 8)), source="an example")
        >>> made["positions"], made["logits"][0][:2]
        ([8, 16, 24, 32, 40, 47], [1.0, 1.0])
    """
    count, vocab_size = logits.shape
    positions = sorted({*range(count // NUM_POSITIONS, count, count // NUM_POSITIONS), count - 1})
    ids = sorted({int(place) for place in np.linspace(0, vocab_size - 1, NUM_IDS)})
    chosen = np.asarray(logits, np.float64)[np.ix_(positions, ids)]
    return {
        "source": source,
        "tokens": tokens.tolist(),
        "positions": positions,
        "ids": ids,
        "largest": float(f"{np.abs(logits).max():.8g}"),
        "logits": [[float(f"{value:.8g}") for value in row] for row in chosen],
    }


def difference_from(fingerprint: Mapping[str, Any], logits: Array) -> float:
    """Returns the largest difference of logits from a fingerprint's, relative to its largest logit.

    Example:
        >>> tokens, logits = probe_tokens(8), np.eye(48, 8)
        >>> difference_from(make_fingerprint(tokens, logits, source="an example"), logits)
        0.0
    """
    wanted = np.asarray(fingerprint["logits"])
    found = np.asarray(logits, np.float64)[np.ix_(fingerprint["positions"], fingerprint["ids"])]
    return float(np.abs(found - wanted).max() / fingerprint["largest"])


def write_fingerprint(folder: Path, tokens: Array, logits: Array, *, source: str) -> Path:
    """Writes the fingerprint of a model folder."""
    path = folder / FINGERPRINT
    write_atomically(path, json.dumps(make_fingerprint(tokens, logits, source=source)) + "\n")
    return path


def check_pretrained(folder: Path | str, *, mesh: str | None = None, tolerance: float = TOLERANCE) -> CheckResult:
    """Compares the logits of a model folder with transformers if it is installed, else with its fingerprint.

    A comparison with transformers that agrees writes the fingerprint.

    Args:
        mesh: mesh to compute on (default: one device).
        tolerance: largest difference to accept, relative to the largest logit.

    Example:
        >>> import tempfile
        >>> from meshwright.checkpoint.convert.pretrained import write_pretrained
        >>> folder, model, tokens = Path(tempfile.mkdtemp(), "hf"), Decoder.named("tiny"), probe_tokens(256)
        >>> params = model.init(jax.random.key(0))
        >>> _ = write_pretrained(folder, model, params)
        >>> _ = write_fingerprint(folder, tokens, model_logits(model, params, tokens), source="an export")
        >>> check_pretrained(folder).is_same
        True
    """
    folder = Path(folder)
    if not has_transformers() and not (folder / FINGERPRINT).is_file():
        raise CheckpointError(
            f"{folder} has no {FINGERPRINT}, and transformers is not installed.",
            hint="run `pip install torch transformers`, or check the folder once on a machine that has them.",
        )
    found = read_pretrained(folder, mesh=mesh, dtype="float32")
    tokens = probe_tokens(found.model.vocab_size)
    if has_transformers():
        source, theirs = _transformers_logits(folder, tokens)
        ours = model_logits(found.model, found.params, tokens)
        result = CheckResult(source, float(np.abs(ours - theirs).max() / np.abs(theirs).max()), tolerance, found.notes)
        if result.is_same:
            try:
                write_fingerprint(folder, tokens, theirs, source=source)
            except OSError as error:
                found.notes.append(f"could not write {folder / FINGERPRINT}: {error.strerror}")
        return result
    stored = _read_fingerprint(folder / FINGERPRINT, found.model.vocab_size)
    ours = model_logits(found.model, found.params, np.asarray(stored["tokens"], np.int32))
    return CheckResult(f"logits stored from {stored['source']}", difference_from(stored, ours), tolerance, found.notes)


def available_memory() -> int | None:
    """Returns the host memory that can be used without swapping, in bytes; None if the system does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), None)


def has_transformers() -> bool:
    """Returns whether torch and transformers are installed."""
    return all(importlib.util.find_spec(name) is not None for name in ("torch", "transformers"))


def _read_fingerprint(path: Path, vocab_size: int) -> dict[str, Any]:
    stored = read_model_json(path)
    try:
        positions, ids, values = (np.asarray(stored[name]) for name in ("positions", "ids", "logits"))
        tokens = np.asarray(stored["tokens"])
        fits = values.shape == (len(positions), len(ids)) and values.size > 0 and stored["largest"] > 0
        fits = fits and positions.min() >= 0 and positions.max() < len(tokens) <= 2**20
        fits = fits and min(ids.min(), tokens.min()) >= 0 and max(ids.max(), tokens.max()) < vocab_size
    except (KeyError, TypeError, ValueError):
        fits = False
    if not fits or not isinstance(stored.get("source"), str):
        raise CheckpointError(f"{path} is damaged, or belongs to another model.", hint="remove it, and check again.")
    return stored


def _transformers_logits(folder: Path, tokens: Array) -> tuple[str, Array]:
    import torch
    import transformers

    # Never runs code from the folder: trust_remote_code is off.
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, attn_implementation="eager"
    )
    with torch.no_grad():
        logits = model.eval()(torch.as_tensor(tokens[None].astype(np.int64))).logits[0].numpy()
    return f"transformers {transformers.__version__}", logits
