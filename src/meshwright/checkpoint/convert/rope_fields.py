"""Rotary positions in a `config.json`: `rope_parameters`, or `rope_theta` and `rope_scaling` of older files."""

from __future__ import annotations

import math
from typing import Any

from meshwright.checkpoint.convert.config_json import ConfigJson
from meshwright.errors import CheckpointError
from meshwright.models import Decoder
from meshwright.models.rope import KINDS, format_scaling, parse_scaling, yarn_attention_factor

# The names of our values in the files, if they differ.
_NAMES = {"original": "original_max_position_embeddings"}
_BY_LAYER = {"full_attention", "sliding_attention"}
_LISTS = ("short_factor", "long_factor")


def read_rope(config: ConfigJson, *, theta: float, local_theta: float | None = None) -> dict[str, Any]:
    """Returns the decoder fields for rotary positions.

    Args:
        theta: the family's default for `rope_theta`.
        local_theta: if given, local layers have unscaled positions of their own, with this default.

    Example:
        >>> read_rope(ConfigJson({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}}), theta=1e4)
        {'rope_theta': 500000.0, 'rope_scaling': 'linear:factor=2.0', 'rotary_fraction': 1.0}
    """
    new, old = config.inner("rope_parameters"), config.inner("rope_scaling")
    theta = config.number("rope_theta", theta)
    fraction = config.number("partial_rotary_factor", 1.0, most=1.0)
    config.get("original_max_position_embeddings")  # without scaling, it has no effect
    own = config.number("rope_local_base_freq", local_theta) if local_theta is not None else None
    by_layer = new is not None and bool(_BY_LAYER & set(new.values))
    if by_layer:
        assert new is not None
        both = {kind: new.inner(kind) or ConfigJson({}) for kind in ("full_attention", "sliding_attention")}
        new.require_read()
        full, local = (_read_one(config, one, theta, fraction) for one in both.values())
        if local_theta is None and local != full:
            raise CheckpointError(f"{new.where} differs between layers, which this family does not support.")
        if local["rope_scaling"] is not None and local != full:
            raise CheckpointError(f"{new.where} scales local layers differently, which is not supported.")
        own = None if local == full else local["rope_theta"]
        if old is not None:
            full = _read_one(config, old, full["rope_theta"], fraction)
    else:
        chosen = new if new is not None and new.values else old
        full = _read_one(config, chosen or ConfigJson({}), theta, fraction)
    return full | ({} if local_theta is None else {"local_rope_theta": own})


def _read_one(config: ConfigJson, rope: ConfigJson, theta: float, fraction: float) -> dict[str, Any]:
    kind = rope.get("rope_type", rope.get("type", "default"))
    rope.get("type")
    found: dict[str, Any] = {
        "rope_theta": rope.number("rope_theta", theta),
        "rope_scaling": None,
        "rotary_fraction": rope.number("partial_rotary_factor", fraction, most=1.0),
    }
    if config.values.get("model_type") == "phi3" and kind in ("su", "yarn"):  # old names of longrope in Phi-3
        kind = "longrope"
    if kind != "default":
        if not isinstance(kind, str) or kind not in KINDS:
            raise rope.error("rope_type", kind, f"one of default, {', '.join(KINDS)}")
        found["rope_scaling"] = format_scaling(kind, _values(config, rope, kind))
    else:
        for name in ("factor", "original_max_position_embeddings", "attention_factor"):
            rope.get(name)  # without a kind, they have no effect
    rope.require_read()
    return found


def _values(config: ConfigJson, rope: ConfigJson, kind: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, default in KINDS[kind].items():
        place = _NAMES.get(name, name)
        if name == "original":
            longest = config.values.get("max_position_embeddings")
            given = rope.get(place)
            if kind == "dynamic":  # transformers ignores the original length here
                given = longest
            elif config.get(place) is not None:
                given = config.get(place)
            values[name] = ConfigJson({place: given if given is not None else longest}, where=rope.where).number(place)
        elif name in _LISTS:
            given = rope.get(place)
            if not isinstance(given, list) or not all(isinstance(x, (int, float)) and 0 < x < 1e12 for x in given):
                raise rope.error(place, given, "a list of numbers above 0")
            values[name] = given
        elif name == "truncate":
            values[name] = float(rope.flag(place, True))
        elif name == "attention_factor":
            values[name] = _attention_factor(config, rope, kind, values)
        else:
            values[name] = rope.number(place) if default is None else rope.number(place, default)
    return values


def _attention_factor(config: ConfigJson, rope: ConfigJson, kind: str, values: dict[str, Any]) -> float:
    if rope.get("attention_factor") is not None:
        return rope.number("attention_factor")
    if kind == "yarn":
        first, second = rope.get("mscale"), rope.get("mscale_all_dim")
        if not (first and second):
            return yarn_attention_factor(values["factor"])
        factors = [yarn_attention_factor(values["factor"], rope.number(name)) for name in ("mscale", "mscale_all_dim")]
        return factors[0] / factors[1]
    longest = config.whole("max_position_embeddings", most=2**40)
    factor = rope.number("factor", longest / values["original"])
    if values["original"] <= 1:
        raise rope.error("original_max_position_embeddings", values["original"], "above 1")
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(values["original"]))


def write_rope(model: Decoder, *, by_layer: bool = False) -> dict[str, Any]:
    """Returns the config fields for a decoder's rotary positions, for new and old readers.

    Example:
        >>> write_rope(Decoder.named("tiny"))
        {'rope_theta': 10000.0, 'rope_parameters': {'rope_type': 'default', 'rope_theta': 10000.0}}
    """
    scaling = written_scaling(model)
    partial = {} if model.rotary_fraction == 1 else {"partial_rotary_factor": model.rotary_fraction}
    full = {"rope_type": "default", "rope_theta": model.rope_theta} | partial | scaling
    fields: dict[str, Any] = {"rope_theta": model.rope_theta, "rope_parameters": full} | partial
    if by_layer:
        theta = model.local_rope_theta
        local = full if theta is None else {"rope_type": "default", "rope_theta": theta} | partial
        fields["rope_parameters"] = {"full_attention": full, "sliding_attention": local}
    return fields | ({"rope_scaling": scaling} if scaling else {})


def written_scaling(model: Decoder) -> dict[str, Any]:
    """Returns the `rope_scaling` of a decoder, empty if it has none.

    Example:
        >>> written_scaling(Decoder.named("tiny", rope_scaling="linear:factor=4"))
        {'rope_type': 'linear', 'factor': 4.0}
    """
    if model.rope_scaling is None:
        return {}
    kind, values = parse_scaling(model.rope_scaling)
    written: dict[str, Any] = {"rope_type": kind}
    for name, value in values.items():
        if name == "original" and kind == "dynamic":
            continue  # it is max_position_embeddings
        if name == "original":
            written[_NAMES[name]] = int(value)
        elif name == "truncate":
            written |= {} if value else {"truncate": False}
        elif name == "attention_factor" and not value:
            written[name] = yarn_attention_factor(values["factor"])
        else:
            written[name] = list(value) if name in _LISTS else value
    return written
