"""The form of a manifest: its fields and their types, checked before anything uses them.

A manifest with the right hash can still come from another program, or from somebody who computed the hash again.
"""

from __future__ import annotations

import re
from typing import Any

import jax.numpy as jnp

from meshwright.bounded_reader import require_fields
from meshwright.errors import FileFormatError

_FIELDS = {"step": int, "files": dict, "tree": list, "mesh": dict, "layout": dict, "rng": dict, "facts": dict}
_FIELDS |= {"versions": dict}


def require_form(body: dict[str, Any], *, where: str) -> None:
    """Raises `FileFormatError` unless every part of a manifest has the form in which it is used.

    Example:
        >>> require_form({"step": 3}, where="manifest.json")
        Traceback (most recent call last):
        meshwright.errors.FileFormatError: manifest.json has no field `files`.
    """
    require_fields(body, _FIELDS, where=where)
    mesh: dict[str, type] = {"axes": dict, "num_devices": int, "device_kind": str, "num_processes": int}
    require_fields(body["mesh"], mesh if body["mesh"] else {}, where=f"`mesh` in {where}")
    axes = body["mesh"].get("axes", {})
    require_fields(axes, dict.fromkeys(axes, int), where=f"`mesh` in {where}")
    counts = [body["step"], body["mesh"].get("num_devices", 0), body["mesh"].get("num_processes", 1), *axes.values()]
    for name, item in body["files"].items():
        require_fields(item, {"bytes": int, "sha256": str}, where=f"the file {name[:80]!r} in {where}")
        counts.append(item["bytes"])
    names = set()
    for item in body["tree"]:
        require_fields(item, {"name": str, "shape": list, "dtype": str}, where=f"a leaf in {where}")
        for shape in (item["shape"], item.get("stored_shape", [])):
            if not isinstance(shape, list) or any(type(size) is not int for size in shape):
                raise FileFormatError(f"{where}: the leaf {item['name'][:80]!r} has no valid shape.")
            counts += shape
        try:
            if not re.fullmatch(r"key<\w{1,40}>|[a-z]\w{1,40}", item["dtype"]):  # numpy evaluates other texts
                raise TypeError
            _ = item["dtype"].startswith("key<") or jnp.dtype(item["dtype"])
        except TypeError:
            raise FileFormatError(f"{where}: the leaf {item['name'][:80]!r} has an unknown dtype.") from None
        names.add(item["name"])
    if len(names) != len(body["tree"]) or not names <= body["layout"].keys():
        raise FileFormatError(f"{where} gives a leaf twice, or one without a layout.")
    for name, spec in body["layout"].items():
        split = [entry if isinstance(entry, list) else [entry] for entry in spec] if isinstance(spec, list) else [[0]]
        if not all(axis is None or isinstance(axis, str) for entry in split for axis in entry):
            raise FileFormatError(f"{where}: the layout of {name[:80]!r} is not a spec.")
    if any(not 0 <= count < 2**63 for count in counts):
        raise FileFormatError(f"{where} has a size or a number that is negative or too large.")
    for part in ("rng", "versions"):
        require_fields(body[part], dict.fromkeys(body[part], str), where=f"`{part}` in {where}")
