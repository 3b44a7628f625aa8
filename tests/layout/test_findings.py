import warnings

import jax
import pytest

import meshwright as mw
from meshwright import P
from meshwright.layout.report import generalise, idle_rules, inside_word_hits

TREE = {
    "embed": {"w": jax.ShapeDtypeStruct((8, 8), "float32")},
    "layers": [{"attn": {"query": jax.ShapeDtypeStruct((8, 8), "float32")}} for _ in range(3)],
    "temperature": jax.ShapeDtypeStruct((), "float32"),
}


def idle(*texts):
    return [str(rule) for rule in idle_rules(mw.match_rules([(text, P()) for text in texts], TREE))]


@pytest.mark.parametrize(
    ("texts", "found"),
    [
        (["embed", "attn"], []),
        (["embed", "attn", ".*"], []),
        (["embed", "attn", ""], []),
        (["embed", "attn", "temperature"], []),  # a leaf of one element needs no rule
        (["embed", ".*", "attn"], ["rule 2 `attn` is shadowed: rule 1 matches `layers/0/attn/query` first"]),
        (["embed", "attn", "temprature"], ["rule 2 `temprature` matches no leaf; the closest path is `temperature`"]),
        (["embed", "attn", "Q" * 9], ["rule 2 `QQQQQQQQQ` matches no leaf"]),
        (
            ["attn/quary", "attn", "embed/w", "^embed"],
            [
                "rule 0 `attn/quary` matches no leaf; the closest path is `layers/0/attn/query`",
                "rule 3 `^embed` is shadowed: rule 2 matches `embed/w` first",
            ],
        ),
    ],
)
def test_idle_rules(texts, found):
    assert idle(*texts) == found


@pytest.mark.parametrize(
    ("text", "warned"),
    [("w", False), ("q", True), ("ue", True), ("que", False), ("query", False), ("/q", False), ("0", False)],
)
def test_letters_inside_words(text, warned):
    hits = inside_word_hits(mw.match_rules([(text, P()), (".*", P())], TREE))
    assert bool(hits) is warned
    assert all(f"rule 0 `{text}` matches inside a word of `layers/0/attn/query`" in hit for hit in hits)


@pytest.mark.parametrize(
    ("name", "pattern"), [("layers/12/w", r"layers/\d+/w"), ("a.b/c-d", r"a\.b/c-d"), ("h_3", r"h_\d+")]
)
def test_generalise(name, pattern):
    assert generalise(name) == pattern
    assert mw.match_rules([(f"{pattern}$", P())], {name: jax.ShapeDtypeStruct((4,), "float32")}).hits == (1,)


def test_suggested_rules_cover_all_leaves():
    mesh = mw.create_abstract_mesh("fsdp:4,tp:2")
    with pytest.raises(mw.LayoutError) as caught:
        mw.make_layout([], TREE, mesh)
    suggested = eval(caught.value.hint.removeprefix("add ").rstrip(".") + ",", {"P": P})
    layout = mw.make_layout(list(suggested), TREE, mesh)
    assert layout["embed/w"].spec == P("fsdp", None)
    assert layout.bytes_per_device == 4 * (4 * 8 * 8) // 4 + 4


def test_no_warning_without_findings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mw.match_partition_rules([("embed", P("tp")), ("query", P())], TREE)
