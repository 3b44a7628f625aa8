"""Sizes that no model can have are refused when it is made."""

import pytest

from meshwright.errors import ConfigError
from meshwright.models import XLSTM, Decoder


@pytest.mark.parametrize("kind", [Decoder, XLSTM])
@pytest.mark.parametrize("name", ["vocab_size", "num_layers", "d_model", "num_heads", "d_ff"])
@pytest.mark.parametrize("value", [0, -1, 2.5, 8.0, True, None, "8"])
def test_sizes_are_whole_numbers_from_one_on(kind, name, value):
    with pytest.raises(ConfigError, match=rf"{name} of {kind.__name__} is {value!r}.\nhint: a whole number from 1 on"):
        kind.named("tiny", **{name: value})


@pytest.mark.parametrize(
    ("kind", "sizes", "message"),
    [
        (Decoder, {"num_kv_heads": 0}, "num_kv_heads of Decoder is 0"),
        (Decoder, {"head_dim": 0}, "head_dim of Decoder is 0"),
        (
            Decoder,
            {"num_heads": 3},
            r"d_model of Decoder is 64, which its num_heads of 3 .*\nhint: d_model of 63 or 66",
        ),
        (Decoder, {"d_model": 63}, r"d_model of Decoder is 63, which its num_heads of 8 .*\nhint: d_model of 56 or 64"),
        (Decoder, {"d_model": 72}, r"9 features \(d_model 72 / num_heads 8\); rotary positions turn them in pairs"),
        (Decoder, {"head_dim": 5}, "5 features; rotary positions"),
        (Decoder, {"num_kv_heads": 3}, "num_heads of Decoder is 8, which its num_kv_heads of 3 does not divide"),
        (Decoder, {"dropout": 1.0}, "dropout of Decoder is 1.0"),
        (XLSTM, {"num_heads": 3}, "d_model of XLSTM is 64"),
        (XLSTM, {"qk_factor": 0.01}, "no feature is left for the keys"),
    ],
)
def test_sizes_that_do_not_go_together_are_told(kind, sizes, message):
    with pytest.raises(ConfigError, match=message):
        kind.named("tiny", **sizes)


def test_all_named_sizes_are_fine():
    for kind in (Decoder, XLSTM):
        for size in kind.SIZES:
            kind.named(size)
    assert Decoder.named("tiny", d_model=63, head_dim=8).d_model == 63
