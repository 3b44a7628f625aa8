import re
import time

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

import meshwright as mw
from meshwright.rules.rule_set import compile_pattern

# Short texts, because the reference is `re`, which may backtrack.
texts = st.text("abAB/_1.é\n", max_size=7)

atoms = st.sampled_from(
    ["a", "b", "A", "/", ".", r"\.", "[ab]", "[^a]", "[a-c/]", r"[^\d_]", r"\w", r"\W", r"\d", r"\s", r"\S", "ab", "é"]
)
anchors = st.sampled_from(["^", "$", r"\b", r"\A", r"\Z"])
quantifiers = st.sampled_from(["*", "+", "?", "{0,2}", "{2}", "{1,}", "{0}", "*?", "+?", "??", "{1,3}?"])
groups = st.sampled_from(["(%s)", "(?:%s)", "(?i:%s)", "(?s:%s)", "(?a:%s)", "(?m:%s)"])


def wider(inner):
    grouped = st.builds(lambda form, body: form % body, groups, inner)
    return st.one_of(
        grouped,
        st.builds(lambda body, times: f"(?:{body}){times}", inner, quantifiers),
        st.builds("{}|{}".format, inner, inner).map(lambda body: f"({body})"),
        st.builds("{}{}".format, inner, inner),
    )


regexes = st.builds(
    lambda flags, whole, body: flags + whole % body,
    st.sampled_from(["", "", "", "(?i)", "(?s)", "(?m)", "(?a)"]),
    st.sampled_from(["%s", "^(?:%s)$", r"\A(?:%s)\Z", "(?:%s)$", "^(?:%s)"]),
    st.recursive(st.one_of(atoms, atoms, st.builds("{}{}".format, atoms, quantifiers), anchors), wider, max_leaves=6),
)


@hypothesis.settings(max_examples=400)
@given(regexes, st.lists(texts, min_size=1, max_size=6))
def test_matching_is_re_search_and_every_match_contains_the_literal(text, names):
    try:
        pattern = compile_pattern(text)
    except mw.RuleError:
        pattern = None
    if pattern is None:  # only repeated groups are refused
        assert re.search(r"\)[*+{]", text)
        return
    for name in names:
        found = re.search(text, name)
        assert pattern.matches(name) is bool(found)
        assert (pattern.search(name) or found) is found or pattern.search(name).span() == found.span()
        if found:
            assert pattern.literal in found.group()


@pytest.mark.parametrize(
    ("text", "literal"),
    [
        ("attn/(q|k|v)/kernel", "/kernel"),
        ("kernel", "kernel"),
        ("(attn)/out/(kernel)", "/out/"),
        ("a?bcd*e", "bc"),
        ("^embed$", "embed"),
        (".*", ""),
        ("(?i)kernel", ""),
        ("(?i:ker)nel", "nel"),
        ("a|b", ""),
        (r"layers/\d+/w", "layers/"),
        (r"a\.b", "a.b"),
    ],
)
def test_required_literal(text, literal):
    assert compile_pattern(text).literal == literal


ACCEPTED = [
    "attn/(q|k|v)/kernel",
    ".*attn.*kernel",
    r"layers/\d+/(attn|mlp)/(q|k|v|out)/kernel",
    r"(?!bias)kernel",
    "(q_proj|k_proj|v_proj|o_proj|gate|up|down|out|wi|wo|embed|head)/(kernel|bias|scale)$",
    ".*encoder.*layers.*attn.*(q|k|v).*kernel.*",
    "(?i).*ENCODER.*Layers.*attn.*kernel.*",
    "(.*attn.*|.*mlp.*)/(kernel|bias)",
    "(layers_\\d+/)?(attn/)*[^/]+/bias",
    "(?x) attn / .* (kernel | bias)  # (a+)+",
    r"(\w)\1",
    r"\(a+\)+",
    "[(]a+[)]+",
    "(?P<layer>ab){3}",
    "a++(?>b+)",
    "(conv|norm)+",
    r"(\d+/){2}",
    r"((conv|norm)_\d+/){3}kernel",
    "(ab|b)*",
    r"(ab|b)*\1",
    "(?>a+)(bc|c)*",
    "(?i)(conv|norm)*/scale",
]


@pytest.mark.parametrize("text", ACCEPTED)
def test_common_patterns_are_accepted_on_long_paths(text):
    name = "params/encoder/layers/12/self_attn/attn/q_proj/kernel/" * 2
    pattern = compile_pattern(text)
    assert bool(pattern.search(name)) is bool(re.search(text, name))


@pytest.mark.parametrize(
    "text",
    [
        "(a+)+/bias$", "(a+)+$", "(a|a)*b", "(a|a)*$", "(a|ab)*c", "(ab|a)*c", "(b|ba|a)+$", "(a|é)*b", "(?i)(a|A)*b",
        "(.*)*x", "(a?)+", "(a?){9}", "(.*a){20}", "(a{0,2}){0,2}", "(|a)+", "(a|)*b", r"(a|\w)*b", "(a|[ab])*c",
        "(a+){5}b", "(a+){2,}b", "((a+){2})+b", "(" * 9 + "a+" + "){4}" * 9,
        r"(a+)+(?=x)", r"(a+)+(?<!x)", r"(a++)+b*", "((a{1,99}){1,99})+", "((a+))+",
        "((a+)?b)*", "(a+)*?b", "(?:(?:a|b)c)*d", "(?i:(A+)+)", "(?P<x>a+)+", "(?x)(a+ # )\n)+", r"([)]a+)+",
        r"(\)a+)+", "(a+)+?b", "(a+){1,}?b", "(?#()(a+)+", "(?:a(?=b*))+", "(?(1)a|b+)*()", "a?" * 30, "(?x: a b)",
    ],
)  # fmt: skip
def test_patterns_that_could_take_exponential_time_are_refused(text):
    with pytest.raises(mw.RuleError, match=r"could take exponential time (.|\n)*\nhint: remove the nested repetition"):
        compile_pattern(text)


# Each can be fast or slow, depending on the path; with `re` alone, the slowest would take hours.
@pytest.mark.parametrize(
    "text",
    [
        ".*.*.*.*x", ".*a.*a.*a.*a.*a.*b", "a*(a*)a*(a*)a*b", "(a*)(a*)a*\\1\\2b", "a?" * 15 + "a" * 15 + "b",
        "(?!z)a*(?!z)a*(?!z)a*(?!z)a*(?!z)b", "(?i)A*A*A*A*A*B", "(ab|a|aba)" * 9 + "c", "(?=a*a*a*a*a*b)",
        "x|.*a.*a.*a.*a.*b", ".*.*.*.*.*x+", "(a*){4}b", "(.*a){4}b", "(a|b)*(a|b)*(a|b)*(a|b)*c",
    ],
)  # fmt: skip
def test_loops_in_a_row_are_bounded_on_every_path(text):
    pattern = compile_pattern(text)
    began, refused = time.process_time(), []
    for name in ("a" * 10, "ab" * 10, "b" * 10, "a" * 60, "ab" * 100, "a" * 2000):
        try:
            assert bool(pattern.search(name)) is bool(re.search(text, name))
        except mw.RuleError:
            refused.append(len(name))
    assert 2000 in refused
    assert 10 not in refused
    assert time.process_time() - began < 20
    with pytest.raises(mw.RuleError, match=r"could take exponential time .*too many places\.\nhint: "):
        pattern.search("a" * 2000)


@pytest.mark.parametrize(
    ("text", "position"), [("a(b", 1), ("*a", 0), ("[a", 0), ("a)", 1), ("a{2,1}", 2), ("(?P<x", 4), ("a\\", 1)]
)
def test_the_caret_points_at_the_mistake(text, position):
    with pytest.raises(mw.RuleError) as caught:
        compile_pattern(text)
    lines = str(caught.value).splitlines()
    assert lines[-3] == f"    {text}"
    assert lines[-2].index("^") == 4 + position
    assert lines[-1].startswith("hint: ")


def test_patterns_too_large_to_parse_are_refused():
    with pytest.raises(mw.RuleError, match="too large or too deeply nested"):
        compile_pattern("a{99999999999999999999}")
