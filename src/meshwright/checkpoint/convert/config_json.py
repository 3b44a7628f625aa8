"""Fields of a `config.json`: each is checked when it is read, and fields that nobody read must not matter."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from meshwright import bounded_reader
from meshwright.errors import CheckpointError, FileFormatError, did_you_mean

CONFIG = "config.json"
MOST_LAYERS, MOST_FEATURES, MOST_TOKENS = 4096, 2**24, 2**31 - 1
_REQUIRED: Any = object()

NO_EFFECT = frozenset(
    [
        "architectures",
        "model_type",
        "torch_dtype",
        "dtype",
        "transformers_version",
        "use_cache",
        "initializer_range",
        "max_position_embeddings",
        "pretraining_tp",
        "auto_map",
        "cache_implementation",
        "name_or_path",
        "is_llama_config",
        "return_dict",
        "output_attentions",
        "output_hidden_states",
        "torchscript",
        "problem_type",
        "id2label",
        "label2id",
        "task_specific_params",
        "chunk_size_feed_forward",
        "tokenizer_class",
        "prefix",
        "eos_token_id",
        "bos_token_id",
        "pad_token_id",
        "sep_token_id",
        "unk_token_id",
        "decoder_start_token_id",
        "unsloth_version",
        "unsloth_fixed",
        "attn_implementation",
        "keys_to_ignore_at_inference",
    ]
)
"""Fields that do not change the logits."""
DROPOUTS = ("attention_dropout", "resid_pdrop", "embd_pdrop", "hidden_dropout", "dropout")


class ConfigJson:
    """The fields of a `config.json`, with the names that were read.

    Example:
        >>> config = ConfigJson({"hidden_size": 64, "trick": 3})
        >>> config.whole("hidden_size", most=1024)
        64
        >>> config.require_read()
        Traceback (most recent call last):
        meshwright.errors.CheckpointError: config.json has trick=3, which may change the function and is not supported.
        hint: if it does not change the logits, pass it as a field to ignore (--ignore-fields trick).
    """

    def __init__(self, values: Mapping[str, Any], *, where: str = CONFIG) -> None:
        if not isinstance(values, Mapping):
            raise CheckpointError(f"{where} holds a {type(values).__name__}, not an object of fields.")
        self.values, self.where, self.seen = values, where, set[str]()

    def get(self, name: str, default: Any = None) -> Any:
        """Returns a field; a missing one and null give the default."""
        self.seen.add(name)
        value = self.values.get(name)
        if value is None:
            if default is _REQUIRED:
                raise CheckpointError(f"{self.where} has no {name!r}.", hint=did_you_mean(name, self.values))
            return default
        return value

    def whole(self, name: str, default: Any = _REQUIRED, *, most: int = MOST_FEATURES) -> int:
        """Returns a whole number from 1 to `most`."""
        value = self.get(name, default)
        fits = not isinstance(value, bool) and isinstance(value, (int, float)) and 1 <= value <= most
        if not fits or value != int(value):
            raise self.error(name, value, f"a whole number from 1 to {most}")
        return int(value)

    def number(self, name: str, default: Any = _REQUIRED, *, most: float = 1e12) -> float:
        """Returns a number above 0 and up to `most`."""
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= most:  # refuses NaN
            raise self.error(name, value, f"a number above 0 and up to {most:g}")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """Returns a truth value."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self.error(name, value, "true or false")
        return value

    def items(self, name: str, count: int, known: Collection[Any]) -> list[Any] | None:
        """Returns a list with a known value for each layer, or None if the field is missing."""
        value = self.get(name)
        if value is None:
            return None
        known = list(known)  # compares, so that values which cannot be hashed are no matter
        if not isinstance(value, list) or len(value) < count or any(item not in known for item in value):
            raise self.error(name, value, f"a list of {count} values from {', '.join(map(str, known))}")
        return value[:count]

    def inner(self, name: str) -> ConfigJson | None:
        """Returns an object inside this one, or None."""
        value = self.get(name)
        return None if value is None else ConfigJson(value, where=f"{name} in {self.where}")

    def only(self, name: str, known: Any, default: Any = None) -> None:
        """Raises unless a field has the one supported value, or is missing with that default."""
        value = self.get(name, known if default is None else default)
        if value != known:
            raise CheckpointError(
                f"{self.where} has {name}={value!r}; only {known!r} is supported.",
                hint="convert another model, or compute its logits with transformers.",
            )

    def require_read(self, ignore: Collection[str] = ()) -> list[str]:
        """Raises if a field was not read and may change the function; returns notes about the others."""
        notes = []
        for name, value in self.values.items():
            if name in DROPOUTS and value:
                notes.append(f"{name}={value} in {self.where} is not applied; use the model's `dropout`")
            if name in self.seen or name in NO_EFFECT or name in DROPOUTS or name in ignore or name.startswith("_"):
                continue
            if value is None or value is False or value in ("", [], {}):
                continue
            text = json.dumps(value)
            raise CheckpointError(
                f"{self.where} has {name}={text if len(text) < 60 else text[:57] + '...'}, which may change the "
                "function and is not supported.",
                hint=f"if it does not change the logits, pass it as a field to ignore (--ignore-fields {name}).",
            )
        return notes

    def error(self, name: str, value: Any, wanted: str) -> CheckpointError:
        """Returns the error for a field with a wrong value."""
        text = repr(value)
        shown = text if len(text) < 80 else text[:77] + "..."
        return CheckpointError(f"{self.where} has {name}={shown}.", hint=f"it must be {wanted}.")


def read_model_json(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "config.json"
        >>> _ = path.write_text('{"vocab_size": 8}')
        >>> read_model_json(path)
        {'vocab_size': 8}
    """
    try:
        data: dict[str, Any] = bounded_reader.read_json(path)
    except (OSError, FileFormatError) as error:
        raise CheckpointError(f"cannot read {path}: {error}", hint="fetch it again; it may be incomplete.") from None
    return data
