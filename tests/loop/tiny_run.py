"""What tests of whole runs share."""

from pathlib import Path

import jax
import numpy as np

from meshwright.loop.callbacks import Callback

QUIET = {"say": lambda text: None}


def bits(state):
    state = jax.tree.map(
        lambda leaf: jax.random.key_data(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf,
        state,
    )
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)]


def fit_folder(config):
    return Path(config.run.run)


class StopAt(Callback):
    """Asks a run to stop at given steps, as SIGTERM does."""

    def __init__(self, *steps):
        self.steps = steps

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def wants_stop(self, loop):
        return loop.ticks in self.steps
