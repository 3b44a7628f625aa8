import json

from hypothesis import given
from hypothesis import strategies as st

from meshwright.pages.markup import Markup, data_block, join, tag, text


@given(st.text(alphabet=st.characters(exclude_categories=())))
def test_any_text_becomes_text(value):
    html = text(value)
    html.encode("utf-8")
    assert not set(html) & set("<>\"'\0\x1b\x7f\x9b")


@given(st.recursive(st.text(alphabet=st.characters(exclude_categories=())) | st.integers(), st.lists))
def test_data_can_be_read_but_not_left(value):
    block = data_block({"value": value})
    inside = block.removeprefix('<script type="application/json">').removesuffix("</script>")
    assert "<" not in inside
    json.dumps(json.loads(inside), ensure_ascii=False).encode("utf-8")  # no halves of characters


def test_data_keeps_what_can_be_shown():
    block = data_block({"name": "a </script> b ü", "y": [1.5, 2]})
    inside = block.removeprefix('<script type="application/json">').removesuffix("</script>")
    assert json.loads(inside) == {"name": "a </script> b ü", "y": [1.5, 2]}


def test_halves_of_characters_do_not_reach_scripts():
    """Chromium ends when a page's text holds one and is asked for its content."""
    assert "\\\\ud800" in data_block({"name": "\ud800"})


def test_markup_is_not_escaped_twice():
    assert tag("p", tag("b", "<"), None, " & ") == "<p><b>&lt;</b> &amp; </p>"
    assert join(["<", Markup("<br>")], " ") == "&lt; <br>"


def test_attributes_may_be_absent_bare_or_zero():
    assert tag("p", hidden=True, open=False, title=None, x=0) == '<p hidden x="0"></p>'
