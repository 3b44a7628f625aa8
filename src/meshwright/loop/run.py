"""`train(config)`: a whole run, which is set up, trained and finished."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack

from meshwright import interrupts
from meshwright.errors import ConfigError
from meshwright.loop.finish import finish
from meshwright.loop.fit import Result, fit
from meshwright.loop.logging.fp8_report import InspectFp8, report_fp8
from meshwright.loop.logging.progress import Voice
from meshwright.loop.settings.config import TrainConfig
from meshwright.loop.setup import set_up


def train(
    config: TrainConfig, *, say: Callable[[str], None] | None = None, inspect_fp8: InspectFp8 | None = None
) -> Result:
    """Trains the model that a configuration describes, in a run folder, and returns the outcome.

    All processes of a run must call it; only process 0 writes logs and prints.

    Args:
        say: function that receives each printed line (default: print to stderr, with a progress line).
        inspect_fp8: function that reads from the compiled step which matmuls really run in fp8, such as
            `meshwright.plan.compiled.fp8_matmuls.inspect_fp8`, which `meshwright train` uses. Without it, a run with
            `--precision fp8` says that this was not checked.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = (folder / "job.py").write_text('''
        ... import numpy as np, meshwright as mw
        ... make_batch = lambda seed: {"x": np.ones((8, 4), np.float32)}
        ... job = mw.Job(
        ...     init=lambda key: {"w": np.zeros(4, np.float32)}, rules=[("w", mw.P())], mesh="dp:8",
        ...     loss=lambda params, batch, rng: (((batch["x"] @ params["w"] - 1) ** 2).mean(), {}),
        ...     batch=make_batch(0), make_batch=make_batch,
        ... )''')
        >>> changes = {"job": f"{folder}/job.py:job", "view": "global", "run": f"{folder}/run", "steps": 2}
        >>> train(TrainConfig().changed(changes), say=lambda line: None).why
        'finished'
    """
    if not isinstance(config, TrainConfig):
        raise ConfigError(
            f"train takes a TrainConfig; got {type(config).__name__}.",
            hint="make one with TrainConfig(...), preset(name) or read_config(file).",
        )
    with ExitStack() as stack:
        began = time.time() if interrupts.watch is None else interrupts.watch.began
        ready = set_up(config, Voice(say), stack, began=began)
        report_fp8(ready.setup, ready.loop.log, ready.state, inspect_fp8)
        result = fit(ready.loop, ready.state, ready.batches)
        finish(ready, result)
        return result
