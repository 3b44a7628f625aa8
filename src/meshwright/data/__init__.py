"""Data: from text files to batches on a mesh. Each process reads only the rows that its devices hold.

`prepare_tokens` tokenizes the documents of `open_documents` with a tokenizer of `load_tokenizer`, `Rows` packs the
tokens, and `Batches` reads the rows in an order that depends only on a seed. A `Ledger` records the rows of each step,
and `check_ledger` checks that none was lost or repeated.
"""

from meshwright.data.array_rows import ArrayRows, read_arrays
from meshwright.data.batches import Batches, eval_batches, job_batches, local_rows, place_rows
from meshwright.data.chat.chat_rows import ChatRows
from meshwright.data.chat.chat_template import ChatTemplate, load_chat_template
from meshwright.data.chat.conversations import prepare_conversations
from meshwright.data.documents import Documents, open_documents
from meshwright.data.fetched_data import fetch_data
from meshwright.data.formats.bin_tokens import open_bin_tokens
from meshwright.data.formats.part import Document
from meshwright.data.iterated import IteratedRows, iterated_batches
from meshwright.data.job_data import open_rows
from meshwright.data.ledger.audit import LedgerReport, check_ledger
from meshwright.data.ledger.journal import Ledger
from meshwright.data.mixture.mixed_batches import MixedBatches
from meshwright.data.mixture.weights import mixture_weights
from meshwright.data.packed_rows import Rows
from meshwright.data.stream import BatchStream, PlacedBatch
from meshwright.data.streamed_rows import stream_rows
from meshwright.data.token_cache import prepare_tokens
from meshwright.data.tokenizer import Tokenizer, load_tokenizer
from meshwright.data.tokens import Tokens

__all__ = [
    "load_tokenizer",
    "Tokenizer",
    "open_documents",
    "Documents",
    "Document",
    "prepare_tokens",
    "open_bin_tokens",
    "Tokens",
    "Rows",
    "load_chat_template",
    "ChatTemplate",
    "prepare_conversations",
    "ChatRows",
    "open_rows",
    "fetch_data",
    "ArrayRows",
    "read_arrays",
    "IteratedRows",
    "Batches",
    "MixedBatches",
    "mixture_weights",
    "PlacedBatch",
    "BatchStream",
    "eval_batches",
    "iterated_batches",
    "stream_rows",
    "job_batches",
    "local_rows",
    "place_rows",
    "Ledger",
    "check_ledger",
    "LedgerReport",
]
