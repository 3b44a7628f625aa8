"""A family of published models: the names of its tensors, and the decoder fields behind its `config.json`.

All families are `Decoder`s with some switches set. A family is a table, and export is checked by reading the written
configuration back: a decoder that does not come back equal has a feature that the family lacks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from meshwright.checkpoint.convert.config_json import MOST_LAYERS, MOST_TOKENS, ConfigJson
from meshwright.checkpoint.convert.rope_fields import read_rope, write_rope
from meshwright.errors import CheckpointError, ConfigError
from meshwright.models import Decoder
from meshwright.models.rope import KINDS, format_scaling, parse_scaling, yarn_attention_factor


class Place(NamedTuple):
    """The tensor of a leaf: `{}` is the layer number, and `turned` means stored transposed, as `[outputs, inputs]`.

    Leaves with the same tensor are rows of it, in the order of the table.
    """

    name: str
    turned: bool = False


def _matrix(name: str) -> Place:
    return Place(f"model.layers.{{}}.{name}.weight", turned=True)


def norm(name: str) -> Place:
    """Returns the place of a layer's norm.

    Example:
        >>> norm("input_layernorm").name
        'model.layers.{}.input_layernorm.weight'
    """
    return Place(f"model.layers.{{}}.{name}.weight")


NAMES: dict[str, Place] = {
    "embed/table": Place("model.embed_tokens.weight"),
    "layers/attn_norm": norm("input_layernorm"),
    "layers/attn/q": _matrix("self_attn.q_proj"),
    "layers/attn/k": _matrix("self_attn.k_proj"),
    "layers/attn/v": _matrix("self_attn.v_proj"),
    "layers/attn/q_bias": Place("model.layers.{}.self_attn.q_proj.bias"),
    "layers/attn/k_bias": Place("model.layers.{}.self_attn.k_proj.bias"),
    "layers/attn/v_bias": Place("model.layers.{}.self_attn.v_proj.bias"),
    "layers/attn/q_norm": norm("self_attn.q_norm"),
    "layers/attn/k_norm": norm("self_attn.k_norm"),
    "layers/attn/o": _matrix("self_attn.o_proj"),
    "layers/mlp_norm": norm("post_attention_layernorm"),
    "layers/mlp/gate": _matrix("mlp.gate_proj"),
    "layers/mlp/up": _matrix("mlp.up_proj"),
    "layers/mlp/down": _matrix("mlp.down_proj"),
    "final_norm/scale": Place("model.norm.weight"),
    "head/kernel": Place("lm_head.weight", turned=True),
}
"""Llama's names, with those of biases and of norms of queries and keys; families change some of them."""
FUSED = {
    **{f"layers/attn/{leaf}": _matrix("self_attn.qkv_proj") for leaf in "qkv"},
    **{f"layers/mlp/{leaf}": _matrix("mlp.gate_up_proj") for leaf in ("gate", "up")},
}
"""Names of fused projections."""
GATES = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}
ReadKinds = Callable[[ConfigJson, int], str]
WriteKinds = Callable[[Decoder], dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family of models in Hugging Face folders.

    Args:
        switches: decoder fields that all its models share.
        fields: further config fields with their decoder fields.
        only: config fields with one supported value.
        names: the tensor of each leaf.
        read_kinds: returns the kinds of the layers, as letters of `Decoder.layer_pattern`.
        write_kinds: returns the config fields for the kinds of the layers.
        theta: default of `rope_theta`.
        local_theta: default of the `rope_theta` of local layers, if they have positions of their own.
        rope_kinds: kinds of scaled rotary positions that its models may have.
        partial_rotary: whether its models may rotate only some features of a head.
        defaults: values of config fields that are absent; a field that is null has no value.
        eps, tied: defaults of `rms_norm_eps` and `tie_word_embeddings`.
    """

    model_type: str
    architecture: str
    switches: Mapping[str, Any] = field(default_factory=dict)
    fields: Mapping[str, str] = field(default_factory=dict)
    only: Mapping[str, Any] = field(default_factory=lambda: {"attention_bias": False, "mlp_bias": False})
    names: Mapping[str, Place] = field(default_factory=lambda: NAMES)
    read_kinds: ReadKinds = lambda config, count: "g" * count
    write_kinds: WriteKinds = lambda model: {}
    theta: float = 10_000.0
    local_theta: float | None = None
    rope_kinds: Collection[str] = tuple(KINDS)
    partial_rotary: bool = False
    defaults: Mapping[str, float] = field(default_factory=dict)
    eps: float = 1e-6
    tied: bool = False

    @property
    def is_fused(self) -> bool:
        """Whether some tensors hold several leaves."""
        tensors = [place.name for place in self.names.values()]
        return len(set(tensors)) < len(tensors)

    @property
    def _gate(self) -> tuple[str, str]:
        activation = self.switches.get("activation", "silu")
        return ("hidden_act" if activation == "silu" else "hidden_activation"), GATES[activation]

    def _default(self, config: ConfigJson, name: str) -> Any:
        return None if name in config.values else self.defaults.get(name)

    def decoder(self, config: ConfigJson, *, ignore: Collection[str] = ()) -> tuple[Decoder, list[str]]:
        """Returns the decoder that a `config.json` describes, and notes; raises if it would compute something else."""
        known = config.get("architectures") or [self.architecture]
        if not isinstance(known, list) or self.architecture not in known:
            raise config.error("architectures", known, f"[{self.architecture!r}], a language model")
        for name, value in self.only.items():
            config.only(name, value)
        name, gate = self._gate
        config.only(name, gate)
        if name != "hidden_act":
            config.get("hidden_act")  # Gemma's files have both, and only the other one counts
        layers = config.whole("num_hidden_layers", most=MOST_LAYERS)
        heads, width = config.whole("num_attention_heads"), config.whole("hidden_size")
        kinds = self.read_kinds(config, layers)
        values: dict[str, Any] = {
            "vocab_size": config.whole("vocab_size", most=MOST_TOKENS),
            "num_layers": layers,
            "d_model": width,
            "num_heads": heads,
            "d_ff": config.whole("intermediate_size"),
            "num_kv_heads": config.whole("num_key_value_heads", self._default(config, "num_key_value_heads") or heads),
            "head_dim": config.whole("head_dim", self._default(config, "head_dim") or max(width // heads, 1)),
            "norm_eps": config.number("rms_norm_eps", self.eps, most=1.0),
            "tied_embeddings": config.flag("tie_word_embeddings", self.tied),
            "layer_pattern": shortest_pattern(kinds),
            "sliding_window": config.whole("sliding_window", 4096, most=MOST_TOKENS) if "l" in kinds else None,
        }
        config.get("sliding_window")
        for place, ours in self.fields.items():
            given = config.get(place, self._default(config, place))
            values[ours] = None if given is None else config.number(place, given)
        values |= dict(self.switches) | read_rope(config, theta=self.theta, local_theta=self.local_theta)
        kind = (values["rope_scaling"] or "").partition(":")[0]
        if kind and kind not in self.rope_kinds:
            raise config.error("rope_type", kind, f"one of default, {', '.join(self.rope_kinds)}")
        if values["rotary_fraction"] != 1 and not self.partial_rotary:
            raise config.error("partial_rotary_factor", values["rotary_fraction"], f"1 in a {self.model_type}")
        if "l" not in kinds:
            values.pop("local_rope_theta", None)
        notes = config.require_read(ignore)
        try:
            return Decoder(**values), notes
        except ConfigError as error:
            raise CheckpointError(f"{config.where} describes no decoder: {error}") from None

    def config(self, model: Decoder, *, dtype: Any = "float32", max_positions: int | None = None) -> dict[str, Any]:
        """Returns the `config.json` of a decoder; raises if the family lacks one of its features."""
        name, gate = self._gate
        written: dict[str, Any] = {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "vocab_size": model.vocab_size,
            "hidden_size": model.d_model,
            "intermediate_size": model.d_ff,
            "num_hidden_layers": model.num_layers,
            "num_attention_heads": model.num_heads,
            "num_key_value_heads": model.num_kv_heads or model.num_heads,
            "head_dim": model.head_dim or model.d_model // model.num_heads,
            name: gate,
            "rms_norm_eps": model.norm_eps,
            "max_position_embeddings": _longest(model, max_positions),
            "tie_word_embeddings": model.tied_embeddings,
            "torch_dtype": str(dtype),
            **self.only,
            "attention_dropout": 0.0,
            "use_cache": True,
            **write_rope(model, by_layer=self.local_theta is not None),
            **self.write_kinds(model),
        }
        for place, ours in self.fields.items():
            value = getattr(canonical(model), ours)
            # transformers checks the types: query_pre_attn_scalar must be an int.
            written[place] = int(value) if ours == "query_scalar" and value == int(value) else value
        self._require_equal(model, written)
        return written

    def _require_equal(self, model: Decoder, written: Mapping[str, Any]) -> None:
        """Raises unless reading a written configuration gives the model back."""
        hint = "choose another family, or leave it out to choose one automatically."
        try:
            found = self.decoder(ConfigJson(written))[0]
        except CheckpointError as error:
            what = str(error).partition("\n")[0]
            raise CheckpointError(f"{self.model_type} cannot express this decoder: {what}", hint=hint) from None
        back, wanted = (dataclasses.asdict(canonical(one)) for one in (found, model))
        for name, value in wanted.items():
            if back[name] != value:
                raise CheckpointError(
                    f"{self.model_type} has no equivalent of {name}={value!r}, so its logits would differ.", hint=hint
                )


def canonical(model: Decoder) -> Decoder:
    """Returns a decoder with the same function, and fields that do not depend on how it was written.

    Example:
        >>> canonical(Decoder.named("tiny")) == canonical(Decoder.named("tiny", head_dim=8, layer_pattern="gg"))
        True
    """
    size = model.head_dim or model.d_model // model.num_heads
    scaling = model.rope_scaling
    if scaling is not None:
        kind, values = parse_scaling(scaling)
        if kind == "yarn" and not values["attention_factor"]:
            values = {**values, "attention_factor": yarn_attention_factor(values["factor"])}
        scaling = format_scaling(kind, values)
    theta = model.local_rope_theta
    return dataclasses.replace(
        model,
        head_dim=size,
        num_kv_heads=model.num_kv_heads or model.num_heads,
        query_scalar=float(size if model.query_scalar is None else model.query_scalar),
        layer_pattern=shortest_pattern(model.layer_kinds),
        rope_scaling=scaling,
        local_rope_theta=None if theta == model.rope_theta and scaling is None else theta,
        dropout=0.0,
    )


def shortest_pattern(kinds: str) -> str | None:
    """Returns the shortest pattern that repeats to these kinds of layers; None if all are global.

    Example:
        >>> shortest_pattern("llgllgll"), shortest_pattern("gggg")
        ('llg', None)
    """
    sizes = range(1, len(kinds) + 1)
    found = next(kinds[:n] for n in sizes if (kinds[:n] * (len(kinds) // n + 1))[: len(kinds)] == kinds)
    return None if found == "g" else found


def _longest(model: Decoder, given: int | None) -> int:
    kind, values = parse_scaling(model.rope_scaling) if model.rope_scaling is not None else ("default", {})
    if kind == "dynamic":
        if given is not None and given != values["original"]:
            raise CheckpointError(
                f"max_positions is {given}, but dynamic scaling starts at {values['original']:g} positions.",
                hint="leave it out.",
            )
        return int(values["original"])
    return given or max(4096, int(values.get("original", 0) * values.get("factor", 1)))
