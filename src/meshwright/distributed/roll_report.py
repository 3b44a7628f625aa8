"""The messages of the roll call: one report per rank and one verdict, each a line of JSON with a proof of the token.

A proof is an HMAC-SHA256 with the run's token over the message and random numbers of both sides, so that it cannot be
made without the token, and not be used again. Messages are not encrypted.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshwright.bounded_reader import parse_json, require_fields
from meshwright.errors import FileFormatError

VERSION = 2
LONGEST_LINE = 32 * 1024
_DEPTH = 4
_LONGEST_FACT = 48
_SHOWN = 20


@dataclass(frozen=True)
class Report:
    """The line that a process sends to rank 0; `facts` must be equal on all ranks."""

    rank: int
    num_processes: int
    host: str
    pid: int
    facts: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host}, process {self.pid})"


def new_nonce() -> str:
    """Returns a random number that is used once."""
    return secrets.token_hex(16)


def challenge(nonce: str, token: str | None) -> bytes:
    """Returns the first line of a connection, which rank 0 sends."""
    return _line({"meshwright": VERSION, "nonce": nonce, "token": token is not None})


def signed_report(report: Report, token: str | None, *, server: str, nonce: str) -> bytes:
    """Returns the line of a rank; `server` is rank 0's random number, `nonce` its own."""
    body = {**vars(report), "nonce": nonce}
    return _line({**body, "proof": _proof(token, "report", server, body)})


def signed_verdict(problem: Sequence[str] | None, token: str | None, *, server: str, nonce: str) -> bytes:
    """Returns the answer to a report: None to continue, or a problem and its hint."""
    body = {"problem": list(problem) if problem is not None else None, "nonce": nonce}
    return _line({**body, "proof": _proof(token, "verdict", server, body)})


def parse_message(data: bytes, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the object in a line; raises `FileFormatError` unless it has these fields, and no deep values."""
    message: dict[str, Any] = parse_json(data, where="the message", depth=_DEPTH)
    require_fields(message, fields, where="the message")
    return message


def is_genuine(message: Mapping[str, Any], token: str | None, kind: str, server: str) -> bool:
    """Returns whether the sender of a message knows the token; always true without one."""
    if token is None:
        return True
    body = {name: value for name, value in message.items() if name != "proof"}
    given = str(message.get("proof")).encode(errors="replace")
    return hmac.compare_digest(given, _proof(token, kind, server, body).encode())


REPORT_FIELDS = {"rank": int, "num_processes": int, "host": str, "pid": int, "facts": dict, "nonce": str, "proof": str}


def parse_report(data: bytes, token: str | None, server: str) -> tuple[Report, str]:
    """Returns a rank's report and its random number; raises `FileFormatError`, or `PermissionError` without proof."""
    message = parse_message(data, REPORT_FIELDS)
    if not is_genuine(message, token, "report", server):
        raise PermissionError
    facts = {name[:100]: value for name, value in message["facts"].items() if isinstance(value, str)}
    if len(facts) != len(message["facts"]):
        raise FileFormatError("the facts of the message are not strings.")
    host = "".join(letter for letter in message["host"][:64] if letter.isprintable())
    return Report(message["rank"], message["num_processes"], host, message["pid"], facts), message["nonce"][:64]


def describe_fact(value: Any) -> str:
    """Returns a fact as text: short values as they are, so that errors can show them, and others as a hash.

    Example:
        >>> describe_fact(300), describe_fact("x" * 100)
        ('300', 'sha256:10a9270a01f7334f')
    """
    text = json.dumps(value, sort_keys=True, default=repr)
    return text if len(text) <= _LONGEST_FACT else f"sha256:{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def disagreement(reports: Sequence[Report]) -> list[str] | None:
    """Returns the first fact in which ranks differ, with the ranks in the minority, and a hint; or None.

    Example:
        >>> reports = [Report(rank, 3, "h", 10 + rank, {"seed": str(rank // 2)}) for rank in range(3)]
        >>> disagreement(reports)[0]
        'the processes of this run differ in `seed`: rank 2 (h, process 12) has 1, but rank 0 (h, process 10) has 0.'
    """
    names = sorted({name for report in reports for name in report.facts})
    wrong = []
    for name in names:
        values = [report.facts.get(name, "nothing") for report in reports]
        if len(set(values)) > 1:
            usual = max(dict.fromkeys(values), key=values.count)
            wrong.append(
                (name, usual, [report for report, value in zip(reports, values, strict=True) if value != usual])
            )
    if not wrong:
        return None
    name, usual, others = wrong[0]
    like = next(report for report in reports if report not in others)
    more = f" They also differ in {', '.join(f'`{other}`' for other, *_ in wrong[1:6])}." if len(wrong) > 1 else ""
    return [
        f"the processes of this run differ in `{name}`: {some(others)} has {others[0].facts.get(name, 'nothing')}, but "
        f"{like} has {usual}.{more}",
        "start every process with the same configuration, seed, code and data.",
    ]


def some(things: Sequence[object]) -> str:
    """Returns the first things of a list as text.

    Example:
        >>> some(range(3)), some(range(100))[-11:]
        ('0, 1, 2', '18, 19, ...')
    """
    return ", ".join(map(str, things[:_SHOWN])) + (", ..." if len(things) > _SHOWN else "")


def _proof(token: str | None, kind: str, server: str, body: Mapping[str, Any]) -> str:
    if token is None:
        return ""
    said = f"meshwright {VERSION} {kind}\n{server}\n{json.dumps(body, sort_keys=True)}"
    return hmac.new(token.encode(), said.encode(), hashlib.sha256).hexdigest()


def _line(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message, sort_keys=True).encode() + b"\n"
