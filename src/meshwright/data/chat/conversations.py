"""Conversations as tokens, rendered and tokenized once into the token cache, with a mask of the assistant's tokens."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.data.cache_folder import FORMAT, HashedFile, Tell, cache_errors, known_content, mapped, open_or_build
from meshwright.data.chat.chat_template import ChatTemplate
from meshwright.data.documents import Documents
from meshwright.data.token_cache import BOUNDS, smallest_dtype
from meshwright.data.tokenizer import Tokenizer
from meshwright.data.tokens import Tokens
from meshwright.errors import DataError

_TELL_SECONDS = 5.0


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
        parts = f"{FORMAT} messages {content} {tokenizer.fingerprint} {template.fingerprint}"
        fingerprint = hashlib.sha256(parts.encode()).hexdigest()

        def write(target: Path) -> dict[str, Any]:
            return _write(documents, tokenizer, template, target, tell)

        target, meta = open_or_build(place, fingerprint, write, tell=tell)
        values = mapped(target / "tokens.bin", np.dtype(meta["dtype"]))
        mask, bounds = mapped(target / "mask.bin", np.dtype("u1")), mapped(target / "bounds.bin", BOUNDS)
    return Tokens(values, bounds[:-1], bounds, meta["largest"], meta["vocab_size"], fingerprint, mask)


def _write(
    documents: Documents, tokenizer: Tokenizer, template: ChatTemplate, folder: Path, tell: Tell
) -> dict[str, Any]:
    dtype = smallest_dtype(tokenizer.vocab_size)
    num_tokens = num_documents = largest = 0
    told = time.monotonic()
    with (
        HashedFile(folder / "tokens.bin") as values,
        HashedFile(folder / "mask.bin") as masks,
        HashedFile(folder / "bounds.bin") as bounds,
    ):
        bounds.write(np.zeros(1, BOUNDS))
        for document in documents.stream():
            ids, mask = template.encode(document.text(), tokenizer, where=document.where)
            if not mask.any():
                raise DataError(f"{document.where}: the chat template renders no text of the assistant.")
            largest = max(largest, int(ids.max()))
            values.write(ids.astype(dtype))
            masks.write(mask.astype(np.uint8))
            num_tokens += len(ids)
            num_documents += 1
            bounds.write(np.array([num_tokens], BOUNDS))
            if time.monotonic() - told > _TELL_SECONDS:
                told = time.monotonic()
                tell(f"tokenizing: {num_documents:,} conversations, {num_tokens:,} tokens so far")
    if not num_documents:
        raise DataError(f"the data is empty: {len(documents.files)} files have no conversations.", hint="add some.")
    tell(f"tokenized {num_documents:,} conversations: {num_tokens:,} tokens")
    return {
        "dtype": dtype.str,
        "num_tokens": num_tokens,
        "num_documents": num_documents,
        "largest": largest,
        "vocab_size": tokenizer.vocab_size,
        "files": {file.name: file.facts() for file in (values, masks, bounds)},
    }
