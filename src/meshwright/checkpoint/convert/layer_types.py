"""The kinds of layers in a `config.json`: windows in all layers, in some, or positions left out in some."""

from __future__ import annotations

from typing import Any

from meshwright.checkpoint.convert.config_json import ConfigJson
from meshwright.checkpoint.convert.family import ReadKinds
from meshwright.models import Decoder

_TYPES = {"full_attention": "g", "sliding_attention": "l"}
_NAMES = {"g": "full_attention", "l": "sliding_attention", "n": "full_attention"}


def window_everywhere(default: int | None) -> ReadKinds:
    """All layers are local if there is a `sliding_window`, as in Mistral.

    Args:
        default: the window if the field is absent.

    Example:
        >>> window_everywhere(None)(ConfigJson({"sliding_window": 4096}), 3)
        'lll'
    """

    def read(config: ConfigJson, count: int) -> str:
        window = config.get("sliding_window", None if "sliding_window" in config.values else default)
        return ("g" if window is None else "l") * count

    return read


def write_window(model: Decoder) -> dict[str, Any]:
    """The fields for `window_everywhere`."""
    return {"sliding_window": model.sliding_window}


def window_between(interval: int, *, field: str | None = None) -> ReadKinds:
    """Layers are local except every `interval`-th, unless `layer_types` lists them, as in Gemma.

    Args:
        field: the config field with the interval, if it has one.

    Example:
        >>> window_between(2)(ConfigJson({"sliding_window": 8}), 3)
        'lgl'
    """

    def read(config: ConfigJson, count: int) -> str:
        every = interval if field is None else config.whole(field, interval)
        listed = config.items("layer_types", count, _TYPES)
        kinds = [_TYPES[kind] for kind in listed] if listed else ["gl"[bool((n + 1) % every)] for n in range(count)]
        return "".join(kinds)

    return read


def window_after(config: ConfigJson, count: int) -> str:
    """Layers from `max_window_layers` on are local if `use_sliding_window` is set, as in Qwen.

    Example:
        >>> fields = {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 8}
        >>> window_after(ConfigJson(fields), 3)
        'gll'
    """
    windowed = config.flag("use_sliding_window") and config.get("sliding_window", 4096) is not None
    first = config.get("max_window_layers", 28)
    if not isinstance(first, int) or first < 0:
        raise config.error("max_window_layers", first, "a whole number of at least 0")
    listed = config.items("layer_types", count, _TYPES)
    if not windowed:
        return "g" * count
    return "".join(_TYPES[kind] for kind in listed) if listed else "".join("gl"[n >= first] for n in range(count))


def write_layer_types(model: Decoder) -> dict[str, Any]:
    """The fields for `window_between`."""
    # Without local layers the window has no effect, but transformers needs a number.
    return {"layer_types": [_NAMES[kind] for kind in model.layer_kinds], "sliding_window": model.sliding_window or 4096}


def write_window_after(model: Decoder) -> dict[str, Any]:
    """The fields for `window_after`."""
    kinds = model.layer_kinds
    return write_layer_types(model) | {
        "use_sliding_window": "l" in kinds,
        "max_window_layers": kinds.find("l") if "l" in kinds else len(kinds),
    }


def bare_layers(config: ConfigJson, count: int) -> str:
    """Some layers have no rotary positions, as in SmolLM 3.

    Example:
        >>> bare_layers(ConfigJson({"no_rope_layer_interval": 2}), 4)
        'gngn'
    """
    config.only("use_sliding_window", False)
    config.get("layer_types")  # all full, without windows
    every = config.whole("no_rope_layer_interval", 4)
    rotated = config.items("no_rope_layers", count, (0, 1))
    return "".join("ng"[int(use)] for use in rotated or [int((n + 1) % every != 0) for n in range(count)])


def write_bare_layers(model: Decoder) -> dict[str, Any]:
    """The fields for `bare_layers`."""
    kinds = model.layer_kinds
    rotated = [int(kind != "n") for kind in kinds]
    return {"no_rope_layers": rotated, "use_sliding_window": False, "layer_types": [_NAMES[kind] for kind in kinds]}
