import itertools
import re

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

import meshwright as mw
from meshwright.rules import patterns
from meshwright.rules.patterns import compile_pattern

# Short texts: `re` itself is the judge here, and it may backtrack.
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


def agrees_with_re(text, names):
    regex = re.compile(text)
    automaton = patterns._Automaton(text, patterns.parser.parse(text), regex.flags)
    for name in names:
        assert automaton.search(name) is bool(regex.search(name)), name


@hypothesis.settings(max_examples=300)
@given(regexes, st.lists(texts, min_size=1, max_size=6))
def test_the_automaton_agrees_with_re(text, names):
    agrees_with_re(text, names * 2)  # twice: the second time from remembered moves


EVERY_SHORT_TEXT = ["".join(letters) for size in range(6) for letters in itertools.product("ab\n", repeat=size)]


@pytest.mark.parametrize(
    "text",
    [
        "a$", r"a\Z", "^a", "(?m)^a$", "(?m)a$", "^$", "(?m)^$", r"\bab", r"b\b", "a.b", "(?s)a.b",
        "^(a+)+$", "^(a*)*b$", "^(a|ab)*$", "^(a?){3}$", "^(ab|b)+?a$", "^(a{1,2}b){2,}$", "^(?:a?b??)*$",
        "^(a{0,2}){0,2}$", "^(a{2}|b{1,3})*$", "^((a|b)*a){2}$", "(ab*)+$", "^[^a]+$", "^[^b]*(a|\\n)+$",
        "(a|b|\\n){4,}", "^(?i:A)+$", r"^\w+\W\w*$", "(^a|b$)+", "^(|a)+$",
    ],
)  # fmt: skip
def test_the_automaton_agrees_with_re_on_every_short_text(text):
    agrees_with_re(text, EVERY_SHORT_TEXT)


@hypothesis.settings(max_examples=200)
@given(regexes, st.lists(texts, min_size=1, max_size=6))
def test_matching_is_re_search_and_the_literal_lies_in_every_match(text, names):
    pattern = compile_pattern(text)
    for name in names:
        found = re.search(text, name)
        assert pattern.matches(name) is bool(found)
        if found:
            assert pattern.literal in found.group()
        if not pattern.linear:
            assert pattern.matched_part(name) == (found.span() if found and pattern.literal in name else None)


@pytest.mark.parametrize(
    ("text", "literal"),
    [
        ("attn/(q|k|v)/kernel", "/kernel"),
        ("kernel", "kernel"),
        ("(attn)/(kernel)", "attn/kernel"),
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


@pytest.mark.parametrize(
    ("text", "linear"),
    [
        ("attn/(q|k|v)/kernel", False),
        (".*attn.*kernel", False),
        (r"layers/\d+/(attn|mlp)/(q|k|v|out)/kernel", False),
        (r"(?!bias)kernel", False),
        ("(a+)+/bias$", True),
        ("(ab|b)*", True),
        ("(a?)+", True),
        (".*.*.*x", True),
        ("(a?){9}", True),
        ("(.*a){20}", True),
    ],
)
def test_what_could_backtrack_a_lot_runs_on_the_automaton(text, linear):
    assert compile_pattern(text).linear is linear


def test_the_automaton_remembers_a_bounded_number_of_moves():
    pattern = compile_pattern("(a+)+[^z]*!$")
    automaton = pattern.search.__self__
    for code in range(0x100, 0x100 + 25_000, 500):
        pattern.search("a" + "".join(map(chr, range(code, code + 500))))
    assert len(automaton._moves) <= 20_001


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (r"(a+)+(?=x)", "look-around"),
        (r"(a+)+(?<!x)", "look-around"),
        (r"(ab|b)*\1", "back-reference"),
        (r"(?>a+)(bc|c)*", "possessive"),
        (r"(a++)+b*", "possessive"),
        (r"(?:a{1,70}){1,70}(bc|c)*", "too many states"),
    ],
)
def test_what_cannot_be_bounded_is_refused(text, why):
    with pytest.raises(
        mw.RuleError, match=rf"could take exponential time .*{why}.*\nhint: remove the nested repetition"
    ):
        compile_pattern(text)


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
