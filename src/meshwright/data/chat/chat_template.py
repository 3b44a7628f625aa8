"""Chat templates: from the messages of a conversation to its text, and the spans that the assistant wrote.

Templates are those of Hugging Face tokenizers: Jinja text in `chat_template.jinja` or `tokenizer_config.json`. They
come from strangers, so they run in Jinja's sandbox. They see no clock, because the same data must give the same tokens.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.bounded_reader import parse_json, read_text
from meshwright.data.formats.part import TOOLS
from meshwright.data.tokenizer import Tokenizer, tokenizer_path
from meshwright.errors import DataError, FileFormatError

ASSISTANT = "assistant"
# Mark the generated text while rendering; private-use characters, which messages must not contain.
_OPEN, _CLOSE = "\uf8f0", "\uf8f1"
_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")


def load_chat_template(path: str | None = None, *, tokenizer: str = "bytes") -> ChatTemplate:
    """Returns the chat template in a file, or the one beside a tokenizer file.

    Args:
        path: a Jinja file, or a `tokenizer_config.json`.
        tokenizer: the path or URL of a `tokenizer.json`. Without `path`, its folder must have a `chat_template.jinja`,
            or a `tokenizer_config.json` with a `chat_template`.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "chat.jinja"
        >>> _ = path.write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}")
        >>> template = load_chat_template(str(path))
        >>> template.render([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}])
        ('<user>Hi</><assistant>Ho</>', [(11, 27)])
    """
    folder = None if tokenizer in ("auto", "bytes") else tokenizer_path(tokenizer).parent
    if path is not None:
        file = Path(path).expanduser()
        text = _read(file)
        config = file if file.suffix == ".json" else None
        if config is None:
            return ChatTemplate(text, special=_special(folder), where=str(file))
        return ChatTemplate(_from_config(config), special=_special(config.parent), where=str(config))
    if folder is not None and (folder / "chat_template.jinja").is_file():
        file = folder / "chat_template.jinja"
        return ChatTemplate(_read(file), special=_special(folder), where=str(file))
    if folder is not None and (folder / "tokenizer_config.json").is_file():
        file = folder / "tokenizer_config.json"
        return ChatTemplate(_from_config(file), special=_special(folder), where=str(file))
    there = "the byte tokenizer has none" if folder is None else f"{folder} has no tokenizer_config.json"
    raise DataError(
        f"conversations need a chat template: {there}.",
        hint="pass --chat-template FILE.jinja, or a tokenizer.json beside its tokenizer_config.json.",
    )


class ChatTemplate:
    """A chat template.

    The assistant's spans are the `{% generation %}` blocks if the template has any. Otherwise they are the text that
    each message of the assistant adds after the prompt for it (`add_generation_prompt`), with the end of its turn.

    Args:
        text: the Jinja text.
        special: special tokens by name, such as `bos_token`.
        where: name of the template in errors.
    """

    def __init__(self, text: str, *, special: Mapping[str, str] | None = None, where: str = "the template") -> None:
        self.where, self.special = where, dict(special or {})
        content = json.dumps([text, self.special], sort_keys=True)
        self.fingerprint = hashlib.sha256(content.encode()).hexdigest()
        environment = _environment()
        try:
            self._template = environment.from_string(text)
        except Exception as error:
            raise DataError(f"{where} is not a chat template: {error}", hint="pass a Jinja template.") from None
        unknown = sorted(_named(environment, text) & set(_SPECIAL) - set(self.special))
        if unknown:
            raise DataError(
                f"{where} uses {', '.join(unknown)}, which no tokenizer_config.json defines.",
                hint="put the tokenizer_config.json of the model beside its tokenizer.json, or write the text itself.",
            )
        self._marks = any(kind == "block_begin" and "generation" in after for kind, after in _blocks(environment, text))

    def render(self, messages: Any, *, where: str = "the conversation") -> tuple[str, list[tuple[int, int]]]:
        """Returns the text of a conversation, and the start and end of each span of the assistant in it.

        Args:
            messages: the messages, or a dict of `messages` and `tools`: a list of descriptions, or its JSON text.
        """
        tools = None
        if isinstance(messages, Mapping):
            messages, tools = messages["messages"], _tools(messages[TOOLS], where)
        messages = _checked(messages, where)
        text = self._render(messages, where, tools=tools)
        if self._marks:
            return _without_marks(text)
        spans = []
        for number, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue
            before = self._render(messages[:number], where, tools=tools, prompt=True)
            through = self._render(messages[: number + 1], where, tools=tools)
            if not (through.startswith(before) and text.startswith(through)):
                raise DataError(
                    f"{where}: {self.where} changes earlier text when message {number} is added, so the assistant's "
                    "text cannot be found.",
                    hint="put it between {% generation %} and {% endgeneration %} in the template.",
                )
            spans.append((len(before), len(through)))
        return text, spans

    def encode(
        self, messages: Any, tokenizer: Tokenizer, *, where: str = "the conversation"
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the token ids of a conversation, and whether the assistant wrote each."""
        text, spans = self.render(messages, where=where)
        try:
            ids, places = tokenizer.encode_places(text)
        except DataError as error:
            raise DataError(f"{where}: {str(error).partition(chr(10))[0]}", hint=error.hint) from None
        mask = np.zeros(len(ids), bool)
        for start, stop in spans:
            mask |= (places >= start) & (places < stop)
        return ids, mask

    def _render(self, messages: Sequence[Any], where: str, *, tools: list[Any] | None, prompt: bool = False) -> str:
        try:
            given = {"messages": messages, TOOLS: tools, "add_generation_prompt": prompt}
            return str(self._template.render(**given, **self.special))
        except Exception as error:  # templates raise anything
            raise DataError(f"{where}: {self.where} failed: {type(error).__name__}: {error}") from None


def _checked(messages: Any, where: str) -> list[Any]:
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{where} has no messages.", hint='write [{"role": "user", "content": "..."}, ...].')
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise DataError(f"{where}: message {number} has no role.", hint='write {"role": ..., "content": ...}.')
        text = json.dumps(message, ensure_ascii=False, default=str)
        if _OPEN in text or _CLOSE in text:
            raise DataError(f"{where}: message {number} has the private-use character U+F8F0 or U+F8F1.")
    if not any(message["role"] == ASSISTANT for message in messages):
        raise DataError(
            f"{where} has no message of the assistant, so nothing in it could be learned.",
            hint="leave it out, or check the roles.",
        )
    # Columns have every key in every message; templates test whether a key is there.
    return [{name: value for name, value in message.items() if value is not None} for message in messages]


def _tools(tools: Any, where: str) -> list[Any] | None:
    """Returns the descriptions of tools, None without any; columns hold them as JSON or have every key in every one."""
    is_text = isinstance(tools, str)
    if is_text:
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise DataError(
                f"{where}: the tools are not JSON: {error}.", hint="write a list of descriptions."
            ) from None
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise DataError(f"{where}: the tools are not a list of objects.", hint="write a list of descriptions.")
    text = json.dumps(tools, ensure_ascii=False, default=str)
    if _OPEN in text or _CLOSE in text:
        raise DataError(f"{where}: a tool has the private-use character U+F8F0 or U+F8F1.")

    def known(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: known(part) for name, part in value.items() if part is not None}
        return [known(part) for part in value] if isinstance(value, list) else value

    found: list[Any] = tools if is_text else known(tools)
    return found


def _without_marks(text: str) -> tuple[str, list[tuple[int, int]]]:
    kept, spans, size = [], [], 0
    for number, piece in enumerate(text.replace(_CLOSE, _OPEN).split(_OPEN)):
        if number % 2 and piece:
            spans.append((size, size + len(piece)))
        kept.append(piece)
        size += len(piece)
    return "".join(kept), spans


@functools.cache
def _environment() -> Any:
    try:
        import jinja2
        import jinja2.ext
        import jinja2.nodes
        import jinja2.sandbox
    except ModuleNotFoundError:
        raise DataError("chat templates need jinja2.", hint="run `pip install 'meshwright[data]'`.") from None

    class GenerationTag(jinja2.ext.Extension):
        """`{% generation %}...{% endgeneration %}` marks the text that the assistant wrote."""

        tags = {"generation"}  # noqa: RUF012 - as in Jinja

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

        def _mark(self, caller: Any) -> str:
            return f"{_OPEN}{caller()}{_CLOSE}"

    def fail(text: str) -> None:
        raise jinja2.TemplateError(text)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = fail
    return environment


def _named(environment: Any, text: str) -> set[str]:
    """Returns the variables that a template prints; others may be absent, as in `{% if bos_token %}`."""
    import jinja2.nodes

    printed: set[str] = set()
    for output in environment.parse(text).find_all(jinja2.nodes.Output):
        for node in output.nodes:
            if isinstance(node, jinja2.nodes.Name):
                printed.add(node.name)
            printed |= {name.name for name in node.find_all(jinja2.nodes.Name)}
    return printed


def _blocks(environment: Any, text: str) -> list[tuple[str, str]]:
    """Returns the tokens of a template that begin a block, each with the name after it."""
    found = [(kind, value) for _, kind, value in environment.lex(text) if kind != "whitespace"]
    return [(kind, found[number + 1][1]) for number, (kind, _) in enumerate(found[:-1])]


def _read(file: Path) -> str:
    try:
        return read_text(file)
    except (OSError, FileFormatError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"cannot read the chat template {file}: {reason}.") from None


def _config(file: Path) -> dict[str, Any]:
    try:
        found = parse_json(_read(file), where=str(file))
    except FileFormatError as error:
        raise DataError(str(error)) from None
    return found if isinstance(found, dict) else {}


def _from_config(file: Path) -> str:
    template = _config(file).get("chat_template")
    if isinstance(template, list):  # several templates by name
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    if not isinstance(template, str):
        raise DataError(
            f"{file} has no chat_template.", hint="pass --chat-template FILE.jinja, or the config of a chat model."
        )
    return template


def _special(folder: Path | None) -> dict[str, str]:
    """Returns the special tokens of a tokenizer's config, for templates that name them."""
    file = None if folder is None else folder / "tokenizer_config.json"
    if file is None or not file.is_file():
        return {}
    config = _config(file)
    values = {name: config[name] for name in _SPECIAL if name in config}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in values.items()}
    # A token that is null does not exist, and templates print nothing for it.
    return {name: value or "" for name, value in texts.items() if value is None or isinstance(value, str)}
