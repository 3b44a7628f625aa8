"""Damaged and hostile variants of bytes and of JSON values, from a fixed seed.

To search further, set `FUZZ_SEED` to another number and `FUZZ_TIMES` to how many times as many variants to make.
"""

import copy
import json
import os
import random

SEED, TIMES = (int(os.environ.get(name, default)) for name, default in (("FUZZ_SEED", 0), ("FUZZ_TIMES", 1)))

HOSTILE = (
    None, True, False, 0, -1, 1, 2**31, 10**400, -(10**30), 0.5, 1e308, float("inf"), float("nan"), "", "x", "../../x",
    "\x00", "\ud800", "é" * 300, "9" * 5000, [], {}, [None], [[]], {"": 0}, ["a", 1, {}], {"a": {"b": [{}]}},
)  # fmt: skip
PIECES = (
    b"", b"\x00", b"\xff", b"\n", b"[", b"]", b"{", b"}", b'"', b"\\", b",", b":", b"[" * 3000, b'{"a":' * 2000,
    b"1" * 6000, b"NaN", b"-Infinity", b"1e999", b"&a ", b"*a ", b"!!python/name:os.system ", b"\xed\xa0\x80",
)  # fmt: skip


def damaged(data, count, seed):
    """Yields variants of bytes: flipped bits, lost, repeated and foreign pieces."""
    rng = random.Random(seed + 1000 * SEED)
    for _ in range(count * TIMES):
        found = bytearray(data)
        for _ in range(rng.choice((1, 1, 1, 2, 5))):
            at = rng.randrange(len(found) + 1)
            end = min(len(found), at + rng.choice((1, 1, 2, 8, 64, len(found))))
            kind = rng.randrange(6)
            if kind <= 1 and at < len(found):
                found[at] ^= 1 << rng.randrange(8)
            elif kind == 2:
                del found[at:end]
            elif kind == 3:
                found[at:at] = found[at:end]
            elif kind == 4:
                found[at:at] = rng.choice(PIECES)
            else:
                found[at:end] = rng.randbytes(end - at)
        yield bytes(found)


def forged(value, count, seed):
    """Yields variants of a JSON value: fields that are lost, renamed or moved, or have another type or value."""
    rng = random.Random(seed + 1000 * SEED)
    for _ in range(count * TIMES):
        found = copy.deepcopy(value)
        for _ in range(rng.choice((1, 1, 1, 2))):
            nodes = list(_containers(found))
            node = rng.choice(nodes)
            if not node:
                continue
            key = rng.choice(list(node)) if isinstance(node, dict) else rng.randrange(len(node))
            kind = rng.randrange(6)
            if kind == 0:
                del node[key]
            elif kind == 1 and isinstance(node, dict):
                node[rng.choice(("", "x", f"{key} ", str(key).upper()))] = node.pop(key)
            elif kind == 2:
                other = rng.choice(nodes)
                node[key] = copy.deepcopy(rng.choice([other, *(other.values() if isinstance(other, dict) else other)]))
            elif kind == 3 and type(node[key]) in (int, float) and abs(node[key]) < 1e300:
                node[key] = rng.choice((node[key] + 1, -node[key], node[key] * 10**6, node[key] / 3, str(node[key])))
            else:
                node[key] = copy.deepcopy(rng.choice(HOSTILE))
        yield found


def forged_texts(value, count, seed):
    """Yields the JSON texts of `forged` values as bytes."""
    for found in forged(value, count, seed):
        yield json.dumps(found).encode("utf-8", "surrogatepass")


def _containers(value):
    if isinstance(value, (dict, list)):
        yield value
        for item in value.values() if isinstance(value, dict) else value:
            yield from _containers(item)
