"""How a step runs as a pipeline: the ticks of its stages, which of them are idle, and what each stage has to do.

This is what `parallel.pipeline.engine` does with the layers of our models: GPipe's schedule, every tick computed
again in the backward pass, the embedding on the first stage and the loss on the last.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.plan.costs.job_costs import JobCosts

PIPELINE_AXIS = "pp"


@dataclass(frozen=True)
class Stages:
    """The pipeline of one minibatch.

    Args:
        count: of stages; 1 where there is no pipeline.
        microbatches: parts that the rows of a minibatch pass it in.

    Example:
        >>> two = Stages(2, 4)
        >>> two.ticks, two.idle, Stages(1, 1).idle
        (5, 0.2, 0.0)
    """

    count: int
    microbatches: int

    @property
    def ticks(self) -> int:
        """Ticks from the first microbatch's entry to the last one's exit."""
        return self.microbatches + self.count - 1

    @property
    def idle(self) -> float:
        """The share of ticks that each stage waits through; exactly 0 without a pipeline."""
        return (self.count - 1) / self.ticks


def stages_of(profile: JobCosts, sizes: Mapping[str, int]) -> Stages:
    """Returns the pipeline of a job on a mesh, given as sizes of its axes."""
    count = sizes.get(PIPELINE_AXIS, 1)
    return Stages(count, profile.num_microbatches or 2 * count) if count > 1 else Stages(1, 1)
