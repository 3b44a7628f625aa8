"""Data: from text to batches on a mesh. Every process reads only what its devices hold, and no row is lost or repeated.

`load_tokenizer` and `open_documents` give `prepare_tokens` what it needs, `Rows` packs the tokens, and `Batches` reads
them in an order that depends on nothing but a seed. A `Ledger` proves it.
"""

from meshwright.data.batches import Batches, eval_batches, job_batches, local_rows, place_rows
from meshwright.data.documents import Document, Documents, open_documents
from meshwright.data.ledger.audit import LedgerReport, check_ledger
from meshwright.data.ledger.journal import Ledger
from meshwright.data.packed_rows import Rows
from meshwright.data.stream import BatchStream, PlacedBatch
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
    "Tokens",
    "Rows",
    "Batches",
    "PlacedBatch",
    "BatchStream",
    "eval_batches",
    "job_batches",
    "local_rows",
    "place_rows",
    "Ledger",
    "check_ledger",
    "LedgerReport",
]
