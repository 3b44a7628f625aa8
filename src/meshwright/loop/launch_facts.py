"""Facts about a run that all ranks send with their roll call, so that ranks which differ stop before JAX starts.

They are cheap: of data, only names, sizes and samples are compared here. The contents are compared once they are read.
"""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path
from typing import Any

import jax

from meshwright.bounded_reader import open_regular
from meshwright.data.documents import find_files
from meshwright.distributed.agreement import code_fingerprint
from meshwright.errors import MeshwrightError
from meshwright.loop.folder.run_dir import PER_PROCESS
from meshwright.loop.settings.config import TrainConfig
from meshwright.loop.settings.mixture_options import parse_sources, single_path

_SAMPLE = 4096  # bytes at each end of a file
_MOST_FILES = 1000  # to sample; all files count with their name and size


def launch_facts(config: TrainConfig) -> dict[str, Any]:
    """Returns the options, versions, code and data of a run, as far as they are known before its start.

    Example:
        >>> facts = launch_facts(TrainConfig())
        >>> facts["seed"], facts["jax version"] == jax.__version__, facts["data files"].startswith("sha256:")
        (0, True, True)
    """
    options = {name: value for name, value in config.flat().items() if name not in PER_PROCESS}
    job = Path((config.model.job or "").rpartition(":")[0])
    code = code_fingerprint([job] if job.suffix == ".py" and job.is_file() else [])
    facts = {**options, "jax version": jax.__version__, "code": f"sha256:{code[:16]}"}
    with contextlib.suppress(MeshwrightError, OSError):  # the run itself reports these
        if config.model.job is None or config.data.data is not None:
            facts["data files"] = _files_digest(config)
    return facts


def _files_digest(config: TrainConfig) -> str:
    sources = parse_sources(config.data.data)
    paths = [single_path(config.data.data)] if sources is None else [*sources.values()]
    if config.data.tokenizer not in ("bytes", "auto"):
        paths.append(config.data.tokenizer)
    found = hashlib.sha256()
    count = 0
    for path in paths:
        for file in find_files(path):
            size = file.stat().st_size
            found.update(f"{file.name} {size}\n".encode(errors="surrogateescape"))
            count += 1
            if count <= _MOST_FILES:
                with open_regular(file) as stream:
                    found.update(stream.read(_SAMPLE))
                    stream.seek(max(0, size - _SAMPLE))
                    found.update(stream.read(_SAMPLE))
    return f"sha256:{found.hexdigest()[:16]}"
