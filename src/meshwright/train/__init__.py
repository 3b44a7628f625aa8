"""Training on any mesh: jobs, the state of a run, and the train step."""

from meshwright.distributed.agreement import fingerprint, require_agreement
from meshwright.lazy import make_callable
from meshwright.train.accumulate import Accumulated, accumulate
from meshwright.train.fine_tuning.adapting import adapt
from meshwright.train.fine_tuning.lora import lora, merged
from meshwright.train.fine_tuning.lora_settings import LoraSettings
from meshwright.train.fp8_scaling import Fp8
from meshwright.train.gradients import Gradients, make_gradients
from meshwright.train.guards import NonFiniteGuard
from meshwright.train.job import Job, abstract_init
from meshwright.train.jobs import equinox_job, linen_job, nnx_job
from meshwright.train.jobs.job_loading import load_job
from meshwright.train.jobs.language_job import language_job, next_token_loss, shift_targets
from meshwright.train.optimizer.muon import muon
from meshwright.train.optimizer.norms import global_norm
from meshwright.train.optimizer.orthogonalize import orthogonalize
from meshwright.train.precision import Precision
from meshwright.train.state import RunState, init_state, make_state, state_layout
from meshwright.train.step import Step, make_eval_step, make_train_step
from meshwright.train.sync import Sync
from meshwright.train.views import View, ViewChoice, choose_view

__all__ = [
    "Job",
    "abstract_init",
    "load_job",
    "linen_job",
    "nnx_job",
    "equinox_job",
    "language_job",
    "next_token_loss",
    "shift_targets",
    "adapt",
    "lora",
    "merged",
    "LoraSettings",
    "muon",
    "orthogonalize",
    "RunState",
    "state_layout",
    "init_state",
    "make_state",
    "make_train_step",
    "make_eval_step",
    "Step",
    "View",
    "choose_view",
    "ViewChoice",
    "Precision",
    "Fp8",
    "NonFiniteGuard",
    "require_agreement",
    "fingerprint",
    "make_gradients",
    "Gradients",
    "global_norm",
    "accumulate",
    "Accumulated",
    "Sync",
]

make_callable(
    __name__, "meshwright.loop.run:train"
)  # `mw.train(config)` runs a configuration; this package holds the step
