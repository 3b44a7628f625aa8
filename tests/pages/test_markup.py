import json

from hypothesis import given
from hypothesis import strategies as st

from meshwright.pages.markup import Markup, data_block, join, tag, text


@given(st.text(alphabet=st.characters(exclude_categories=())))
def test_any_text_is_escaped(value):
    html = text(value)
    html.encode("utf-8")
    assert not set(html) & set("<>\"'\0\x1b\x7f\x9b")


@given(st.recursive(st.text(alphabet=st.characters(exclude_categories=())) | st.integers(), st.lists))
def test_data_cannot_close_its_script_element(value):
    block = data_block({"value": value})
    inside = block.removeprefix('<script type="application/json">').removesuffix("</script>")
    assert "<" not in inside
    json.dumps(json.loads(inside), ensure_ascii=False).encode("utf-8")  # no lone surrogates


def test_data_keeps_printable_text():
    block = data_block({"name": "a </script> b ü", "y": [1.5, 2]})
    inside = block.removeprefix('<script type="application/json">').removesuffix("</script>")
    assert json.loads(inside) == {"name": "a </script> b ü", "y": [1.5, 2]}


def test_lone_surrogates_are_escaped_in_data():
    """Chromium crashes when it serializes a page that contains one."""
    assert "\\\\ud800" in data_block({"name": "\ud800"})


def test_markup_is_not_escaped_twice():
    assert tag("p", tag("b", "<"), None, " & ") == "<p><b>&lt;</b> &amp; </p>"
    assert join(["<", Markup("<br>")], " ") == "&lt; <br>"


def test_attributes_may_be_absent_bare_or_zero():
    assert tag("p", hidden=True, open=False, title=None, x=0) == '<p hidden x="0"></p>'
