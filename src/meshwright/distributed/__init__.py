"""Multi-process runs: joining, the roll call, schedulers, and agreement between ranks."""

from meshwright.distributed.agreement import agree, fingerprint, require_agreement
from meshwright.distributed.join import join
from meshwright.distributed.token import create_token
from meshwright.errors import LaunchError

__all__ = ["join", "create_token", "agree", "require_agreement", "fingerprint", "LaunchError"]
