"""Conversations: templates, the assistant's spans, and rows checked against a slow reference."""

import json

import jax
import numpy as np
import pytest

from meshwright.data import ChatRows, ChatTemplate, Documents, Tokens, load_chat_template, load_tokenizer
from meshwright.data import prepare_conversations as prepare
from meshwright.errors import DataError
from meshwright.models import Decoder
from meshwright.train import language_job

BYTES = load_tokenizer("bytes")
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{{ bos_token }}{% for message in messages %}[{{ message.role }}]"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content | trim }}!{% endgeneration %}"
    "{% else %}{{ message.content }}{% endif %}{{ '\n' }}{% endfor %}"
)
WORDS = ["a", "rose", "is", "ä", "日本", "\n\n", "<|im_end|", "  ", "🌹", "{{ 7 * 7 }}", "assistant"]


def conversation(generator, *, longest=30):
    """Random messages, with at least one of the assistant at a random place."""
    roles = [*generator.choice(["user", "system", "assistant"], generator.integers(0, 6)), "assistant"]
    generator.shuffle(roles)
    texts = ["".join(generator.choice(WORDS, generator.integers(0, longest))) for _ in roles]
    return [{"role": str(role), "content": text} for role, text in zip(roles, texts, strict=True)]


def slow_reference(messages):
    """Returns the bytes of a conversation in ChatML, and whether the assistant wrote each, one byte at a time."""
    ids, mask = [], []
    for message in messages:
        for byte in f"<|im_start|>{message['role']}\n".encode():
            ids.append(byte)
            mask.append(False)
        for byte in f"{message['content']}<|im_end|>\n".encode():
            ids.append(byte)
            mask.append(message["role"] == "assistant")
    return ids, mask


def write(path, conversations):
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in conversations))
    return Documents([path], text_field="messages", messages=True)


def check_rows(rows, expected):
    """Checks every conversation to be in one row, alone in its segment, whole or cut at the row's end."""
    found = {}
    for number in range(len(rows)):
        row = rows[number]
        segments = row["segment_ids"]
        count = int(segments.max())
        assert segments.tolist() == sorted(segments[segments > 0].tolist()) + [0] * int((segments == 0).sum())
        for segment, document in zip(range(1, count + 1), rows.members(number), strict=True):
            here = segments == segment
            ids = [int(row["inputs"][here][0]), *row["targets"][here].tolist()]
            assert row["inputs"][here].tolist() == ids[:-1], "a target belongs to another conversation"
            mask = row["weights"][here].astype(bool).tolist()
            assert document not in found
            found[int(document)] = (ids, mask)
        assert (row["weights"][segments == 0] == 0).all()
        assert rows.num_targets(number) == int(row["weights"].sum()) > 0
    for document, (ids, mask) in enumerate(expected):
        size = min(len(ids), rows.num_tokens + 1)
        if any(mask[1:size]):
            assert found.pop(document) == (ids[:size], mask[1:size]), document
    assert not found
    return sum(len(ids) - 1 for ids, _ in expected) / (len(rows) * rows.num_tokens)


def test_packed_conversations_equal_a_slow_reference(tmp_path):
    generator = np.random.default_rng(0)
    conversations = [conversation(generator) for _ in range(10_000)]
    expected = [slow_reference(messages) for messages in conversations]
    tokens = prepare(write(tmp_path / "chat.jsonl", conversations), BYTES, ChatTemplate(CHATML), folder=tmp_path / "c")
    assert tokens.num_documents == 10_000
    rows = ChatRows(tokens, 1024)
    assert check_rows(rows, expected) > 0.9, "rows are mostly padding"
    assert rows.most_segments == 1 + max(len(rows.members(place)) for place in range(len(rows)))
    short = ChatRows(tokens, 150)
    assert short.num_cut > 100
    assert short.num_dropped > 10
    check_rows(short, expected)
    train, validation = tokens.split(0.1)
    assert sum(len(part.starts) for part in (train, validation)) == 10_000
    assert ChatRows(train, 1024).total_targets + ChatRows(validation, 1024).total_targets == rows.total_targets


def test_a_packed_conversation_has_the_loss_that_it_has_alone():
    generator = np.random.default_rng(2)
    documents = [generator.integers(1, 32, size).tolist() for size in (12, 7, 20, 9, 5, 3)]
    masks = [[0] * 2 + [1] * (len(ids) - 2) for ids in documents]
    packed = ChatRows(Tokens.of(documents, mask=masks), 24)
    assert max(len(packed.members(number)) for number in range(len(packed))) > 1
    alone = [ChatRows(Tokens.of([ids], mask=[mask]), 24)[0] for ids, mask in zip(documents, masks, strict=True)]
    model = Decoder(vocab_size=32, num_layers=2, d_model=16, num_heads=2, d_ff=32)
    job = language_job(model, batch_size=1, num_tokens=24, packed=True)
    params = job.init(jax.random.key(0))

    def loss(rows):
        batch = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
        return jax.jit(lambda batch: job.loss(params, batch, jax.random.key(1))[0])(batch)

    found, expected = loss([packed[number] for number in range(len(packed))]), loss(alone)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_generation_blocks_mark_the_assistant():
    template = ChatTemplate(MARKED, special={"bos_token": "<s>"})
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": " Ho "},
        {"role": "user", "content": "ä"},
        {"role": "assistant", "content": ""},
    ]
    text, spans = template.render(messages)
    assert text == "<s>[user]Hi\n[assistant]Ho!\n[user]ä\n[assistant]!\n"
    assert [text[start:stop] for start, stop in spans] == ["Ho!", "!"]
    ids, mask = template.encode(messages, BYTES)
    assert bytes(ids[mask]).decode() == "Ho!!"


def test_a_template_needs_the_tokens_that_it_prints(tmp_path):
    file = tmp_path / "chat.jinja"
    file.write_text("{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}")
    with pytest.raises(
        DataError, match=r"uses bos_token, eos_token, which no tokenizer_config.json defines.\nhint: put"
    ):
        load_chat_template(str(file))
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": null, "eos_token": "</s>"}')
    template = load_chat_template(str(file), tokenizer=str(tmp_path / "tokenizer.json"))
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    assert template.render(messages) == ("Hi</s>Ho</s>", [(6, 12)])


def test_marks_are_rejected_anywhere_in_a_message():
    template = ChatTemplate("{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}")
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a\uf8f0b"}]},
        {"role": "assistant", "content": "Ho"},
    ]
    with pytest.raises(DataError, match="message 0 has the private-use character"):
        template.render(messages)


def test_a_tokenizer_with_special_tokens(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(["a rose is a rose 🌹 assistant user\n"] * 20, trainer)
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer.json"))
    config = {"chat_template": [{"name": "tools", "template": ""}, {"name": "default", "template": CHATML}]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": {"content": "<|im_end|>"}}))
    template = load_chat_template(tokenizer=str(tmp_path / "tokenizer.json"))
    assert template.special == {"eos_token": "<|im_end|>"}
    generator = np.random.default_rng(1)
    for _ in range(50):
        messages = conversation(generator)
        ids, mask = template.encode(messages, tokenizer)
        wanted, marks = slow_reference(messages)
        assert tokenizer.decode(ids).encode() == bytes(wanted)
        # Every token is within one turn, so the assistant's tokens are exactly the assistant's bytes.
        assert tokenizer.decode(ids[mask]).encode() == bytes(np.array(wanted, np.uint8)[np.array(marks)])


def test_conversations_in_columns(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    conversations = [conversation(np.random.default_rng(number)) for number in range(20)]
    conversations[3][0]["name"] = "Ada"  # every message of the column gets this key
    parquet.write_table(pyarrow.table({"messages": conversations}), tmp_path / "chat.parquet")
    named = "{% for m in messages %}{% if m.name is defined %}{{ m.name }}{% endif %}{{ m.content }}.{% endfor %}"
    columns = Documents([tmp_path / "chat.parquet"], text_field="messages", messages=True)
    lines = write(tmp_path / "chat.jsonl", conversations)
    found, expected = (prepare(each, BYTES, ChatTemplate(named), folder=tmp_path / "c") for each in (columns, lines))
    for name in ("values", "mask", "bounds"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))


# --- Bad input ---


def render(messages, text=CHATML):
    return ChatTemplate(text).render(messages, where="line 3")


@pytest.mark.parametrize(
    ("messages", "match"),
    [
        ([], "line 3 has no messages"),
        ("Hi", "line 3 has no messages"),
        (["Hi"], "message 0 has no role"),
        ([{"from": "human", "value": "Hi"}], "message 0 has no role"),
        ([{"role": "user", "content": "Hi"}], "line 3 has no message of the assistant"),
        ([{"role": "assistant", "content": "a\uf8f0"}], "private-use character"),
        ([{"role": "assistant"}], r"the template failed: \w+Error"),
    ],
)
def test_wrong_messages(messages, match):
    with pytest.raises(DataError, match=match):
        render(messages)


def test_wrong_templates(tmp_path):
    messages = [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}]
    with pytest.raises(DataError, match=r"is not a chat template: .*endfor"):
        render(messages, "{% for m in messages %}")
    with pytest.raises(DataError, match="only two roles"):
        render(messages, "{{ raise_exception('only two roles') }}")
    with pytest.raises(DataError, match="SecurityError"):
        render(messages, "{{ messages.__class__.__mro__ }}")
    with pytest.raises(DataError, match="SecurityError"):
        render(messages, "{{ messages.append(1) }}")
    with pytest.raises(DataError, match=r"changes earlier text when message 0 is added.*\nhint: put it between"):
        render(messages, "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(DataError, match=r"need a chat template: the byte tokenizer has none.\nhint: pass --chat-temp"):
        load_chat_template()
    with pytest.raises(DataError, match=r"has no tokenizer_config.json"):
        load_chat_template(tokenizer=str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(DataError, match="has no chat_template"):
        load_chat_template(tokenizer=str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(DataError, match="is not JSON"):
        load_chat_template(str(tmp_path / "tokenizer_config.json"))
    with pytest.raises(DataError, match=r"cannot read the chat template .*: No such file"):
        load_chat_template(str(tmp_path / "none.jinja"))


def test_wrong_conversations(tmp_path):
    path = tmp_path / "chat.jsonl"
    good = [{"role": "assistant", "content": "Hi"}]
    documents = write(path, [good, [{"role": "user", "content": "Hi"}]])
    with pytest.raises(DataError, match=r"chat.jsonl, line 2 has no message of the assistant"):
        prepare(documents, BYTES, ChatTemplate(CHATML), folder=tmp_path / "c")
    with pytest.raises(DataError, match=r"chat.jsonl, line 1: the chat template renders no text of the assistant"):
        prepare(write(path, [good]), BYTES, ChatTemplate("hello"), folder=tmp_path / "c")
    with pytest.raises(DataError, match=r"chat.jsonl, line 1: byte 29 is 0"):
        prepare(
            write(path, [[{"role": "assistant", "content": "1234567\0"}]]),
            BYTES,
            ChatTemplate(CHATML),
            folder=tmp_path / "c",
        )
    path.write_text('{"messages": "Hi"}\n')
    with pytest.raises(DataError, match="line 1: field 'messages' is a str, not a list of messages"):
        prepare(Documents([path], text_field="messages", messages=True), BYTES, ChatTemplate(CHATML), folder=tmp_path)
    path.write_text("")
    with pytest.raises(DataError, match="files have no conversations"):
        prepare(Documents([path], text_field="messages", messages=True), BYTES, ChatTemplate(CHATML), folder=tmp_path)
    with pytest.raises(DataError, match="holds no messages"):
        Documents([tmp_path / "a.txt"], messages=True)
    with pytest.raises(DataError, match="no mask of the assistant"):
        ChatRows(Tokens.of([[1, 2]]), 4)
    with pytest.raises(DataError, match="in its first 1 tokens"):
        ChatRows(Tokens.of([[1, 2, 3]], mask=[[0, 0, 1]]), 1)
    with pytest.raises(DataError, match="one conversation cannot be split"):
        Tokens.of([[1, 2, 3]], mask=[[0, 0, 1]]).split(0.5)
    with pytest.raises(DataError, match="different lengths"):
        Tokens.of([[1, 2, 3]], mask=[[0, 0]])
