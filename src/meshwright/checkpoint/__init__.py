"""Verified checkpoints: hashed when saved, checked before they are restored, onto any mesh."""

from meshwright.checkpoint.durable import DurableSteps
from meshwright.checkpoint.manifest import Manifest, read_manifest, verify_step
from meshwright.checkpoint.restoring import Restored
from meshwright.checkpoint.retention import Keep
from meshwright.checkpoint.store import Checkpoints
from meshwright.checkpoint.tiers import TieredCheckpoints

__all__ = [
    "Checkpoints",
    "TieredCheckpoints",
    "DurableSteps",
    "Keep",
    "Restored",
    "Manifest",
    "read_manifest",
    "verify_step",
]
