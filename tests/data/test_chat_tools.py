"""The tools of a conversation reach the chat template, from every format."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from meshwright.data import ChatTemplate, Documents, load_tokenizer, prepare_conversations
from meshwright.errors import DataError

MESSAGES = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
TOOLS = [{"name": "add", "parameters": {"a": "int"}}, {"name": "now"}]
TEMPLATE = (
    "{% if tools %}[{% for t in tools %}{{ t.name }}{% if 'parameters' in t %}!{% endif %} {% endfor %}]{% endif %}"
    "{% for m in messages %}<{{ m.content }}>{% endfor %}"
)


def written(folder, form, records):
    path = folder / f"chat.{form}"
    if form == "jsonl":
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return path
    table = pa.Table.from_pylist(records)
    if form == "parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_stream(str(path), table.schema) as writer:
            writer.write_table(table)
    return path


def texts(path):
    documents = Documents([path], text_field="messages", messages=True)
    tokens = prepare_conversations(
        documents, load_tokenizer("bytes"), ChatTemplate(TEMPLATE), folder=path.parent / f"cache-{path.suffix}"
    )
    return bytes(tokens.values), tokens.mask


@pytest.mark.parametrize("form", ["jsonl", "parquet", "arrow"])
@pytest.mark.parametrize("as_text", [False, True])
def test_templates_get_the_tools(tmp_path, form, as_text):
    """Columns fill up objects with nulls; the template does not see them."""
    given = json.dumps(TOOLS) if as_text else TOOLS
    records = [{"messages": MESSAGES, "tools": given}, {"messages": MESSAGES, "tools": None}]
    text, mask = texts(written(tmp_path, form, records))
    assert text == b"[add! now ]<2+2?><4><2+2?><4>"
    assert [letter for letter, learned in zip(text, mask, strict=True) if learned] == list(b"<4><4>")


def test_conversations_without_tools_need_none(tmp_path):
    assert texts(written(tmp_path, "jsonl", [{"messages": MESSAGES}]))[0] == b"<2+2?><4>"


@pytest.mark.parametrize(
    ("tools", "said"),
    [("{", "the tools are not JSON"), ({"name": "add"}, "not a list of objects"), (["add"], "not a list of objects"),
     ([{"name": "\uf8f0"}], "a tool has the private-use character")],
)  # fmt: skip
def test_wrong_tools_are_errors(tmp_path, tools, said):
    with pytest.raises(DataError, match=rf"chat.jsonl, line 1: .*{said}"):
        texts(written(tmp_path, "jsonl", [{"messages": MESSAGES, "tools": tools}]))
