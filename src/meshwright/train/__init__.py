"""Training: gradients of a batch, in as many parts and on as many devices as it takes."""

from meshwright.train.accumulate import (
    Accumulated,
    accumulate,
    accumulate_gradients,
    accumulate_gradients_loop,
    accumulate_gradients_scan,
)
from meshwright.train.sync import Sync

__all__ = [
    "accumulate",
    "Accumulated",
    "Sync",
    "accumulate_gradients",
    "accumulate_gradients_loop",
    "accumulate_gradients_scan",
]
