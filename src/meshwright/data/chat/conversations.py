"""Conversations as tokens, rendered and tokenized once into the token cache, with a mask of the assistant's tokens."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from meshwright.data.cache_folder import FORMAT, Tell, cache_errors, known_content
from meshwright.data.chat.chat_template import ChatTemplate
from meshwright.data.documents import Documents
from meshwright.data.token_cache import TokenWriter, open_tokens
from meshwright.data.tokenizer import Tokenizer
from meshwright.data.tokens import Tokens
from meshwright.errors import DataError


def prepare_conversations(
    documents: Documents,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    *,
    folder: str | os.PathLike[str],
    tell: Tell | None = None,
) -> Tokens:
    """Returns the tokens of conversations with a `mask` of the assistant's, from a cache that is built on first use.

    Args:
        documents: `Documents(files, text_field="messages", messages=True)`.
        folder: the cache folder; created if missing.
        tell: called with a line of text about progress, and if a cache is damaged.

    Example:
        >>> import json, tempfile
        >>> from meshwright.data import ChatTemplate, load_tokenizer
        >>> path = Path(tempfile.mkdtemp()) / "chat.jsonl"
        >>> messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
        >>> _ = path.write_text(json.dumps({"messages": messages}))
        >>> documents = Documents([path], text_field="messages", messages=True)
        >>> template = ChatTemplate("{% for m in messages %}{{ m.content }}.{% endfor %}")
        >>> tokens = prepare_conversations(documents, load_tokenizer("bytes"), template, folder=path.parent / "cache")
        >>> bytes(tokens.values), tokens.mask.tolist()
        (b'Hi.Ho.', [0, 0, 0, 1, 1, 1])
    """
    tell, place = tell or (lambda line: None), Path(folder)
    with cache_errors(folder):
        key = [documents.text_field, "messages"]
        content = known_content(place, documents.stamps(), key, lambda: documents.fingerprint)
        parts = f"{FORMAT} messages tools {content} {tokenizer.fingerprint} {template.fingerprint}"
        fingerprint = hashlib.sha256(parts.encode()).hexdigest()

        def write(target: Path) -> dict[str, Any]:
            return _write(documents, tokenizer, template, target, tell)

        return open_tokens(place, fingerprint, write, tell=tell, masked=True)


def _write(
    documents: Documents, tokenizer: Tokenizer, template: ChatTemplate, folder: Path, tell: Tell
) -> dict[str, Any]:
    with TokenWriter(folder, tokenizer, "conversations", tell=tell, masked=True) as writer:
        for document in documents.stream():
            ids, mask = template.encode(document.text(), tokenizer, where=document.where)
            if not mask.any():
                raise DataError(f"{document.where}: the chat template renders no text of the assistant.")
            writer.add([ids], mask=mask)
    if not writer.num_documents:
        raise DataError(f"the data is empty: {len(documents.files)} files have no conversations.", hint="add some.")
    tell(f"tokenized {writer.so_far}")
    return writer.facts()
