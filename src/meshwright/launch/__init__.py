"""Several processes as one run."""

from meshwright.launch.processes import agree, join
from meshwright.launch.roll_call import LaunchError

__all__ = ["join", "agree", "LaunchError"]
