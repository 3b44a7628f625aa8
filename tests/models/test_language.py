"""Validation of model sizes."""

import pytest

from meshwright.errors import ConfigError
from meshwright.models import XLSTM, Decoder, LanguageModel


@pytest.mark.parametrize("kind", [Decoder, XLSTM])
@pytest.mark.parametrize("name", ["vocab_size", "num_layers", "d_model", "num_heads", "d_ff"])
@pytest.mark.parametrize("value", [0, -1, 2.5, 8.0, True, None, "8"])
def test_sizes_must_be_positive_integers(kind, name, value):
    with pytest.raises(ConfigError, match=rf"{name} of {kind.__name__} must be a positive integer; got {value!r}\."):
        kind.named("tiny", **{name: value})


@pytest.mark.parametrize(
    ("kind", "sizes", "message"),
    [
        (Decoder, {"num_kv_heads": 0}, "num_kv_heads of Decoder must be a positive integer; got 0"),
        (Decoder, {"head_dim": 0}, "head_dim of Decoder must be a positive integer; got 0"),
        (
            Decoder,
            {"num_heads": 3},
            r"d_model of Decoder is 64, .* multiple of num_heads \(3\).\nhint: use d_model=63 or 66",
        ),
        (Decoder, {"d_model": 63}, r"d_model of Decoder is 63, .* num_heads \(8\).\nhint: use d_model=56 or 64"),
        (Decoder, {"d_model": 72}, r"9 features \(d_model 72 / num_heads 8\), but rotary positions"),
        (Decoder, {"head_dim": 5}, "5 features, but rotary positions"),
        (Decoder, {"num_kv_heads": 3}, r"num_heads of Decoder is 8, which is not a multiple of num_kv_heads \(3\)"),
        (Decoder, {"dropout": 1.0}, "dropout of Decoder must be at least 0 and below 1; got 1.0"),
        (XLSTM, {"num_heads": 3}, "d_model of XLSTM is 64"),
        (XLSTM, {"qk_factor": 0.01}, "leaves no key features"),
    ],
)
def test_inconsistent_sizes(kind, sizes, message):
    with pytest.raises(ConfigError, match=message):
        kind.named("tiny", **sizes)


def test_all_named_sizes_are_valid():
    for kind in (Decoder, XLSTM):
        for size in kind.SIZES:
            kind.named(size)
    assert Decoder.named("tiny", d_model=63, head_dim=8).d_model == 63


def test_a_model_must_define_a_layer():
    with pytest.raises(TypeError, match="abstract"):
        LanguageModel(vocab_size=8, num_layers=1, d_model=8)
