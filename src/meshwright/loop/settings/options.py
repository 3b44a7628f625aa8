"""The options of a run, in groups: their names, defaults and help texts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meshwright.parallel.pipeline.named_schedules import ScheduleName

OPTIMIZERS = ("adamw", "muon", "adafactor", "lion", "sgd")
SCHEDULES = ("cosine", "linear", "constant")
NUM_ROWS = 16
"""Rows per step if neither the options nor a job say otherwise."""


@dataclass(frozen=True)
class ModelOptions:
    """Model to train."""

    model: str = "auto"
    """Name of a built-in model: decoder-SIZE or xlstm-SIZE; auto is that of --init-from, or decoder-small."""
    model_options: tuple[str, ...] = ()
    """Model fields to override, e.g. num_layers=4 dropout=0.1."""
    job: str | None = None
    """Custom job to train instead, as module:attribute or file.py:attribute."""


@dataclass(frozen=True)
class DataOptions:
    """Training data and batches."""

    data: str | tuple[str, ...] | None = None
    """File, folder or glob of text, .jsonl, .parquet, .arrow, .array_record or token .bin; or a mixture of several, as
    NAME=PATH NAME=PATH ...; for a job without text, a file or folder of .npy or .npz (default: the job's data, or the
    source of Python's standard library). URLs such as s3://BUCKET/*.jsonl are fetched into the cache."""
    mixture_weights: tuple[str, ...] = ()
    """Weights of a mixture, as NAME=WEIGHT for each source; they may change on resume (default: by size)."""
    mixture_temperature: float | None = None
    """Weigh the sources of a mixture by size ** (1 / temperature): 1 follows their sizes, larger values move toward
    equal weights."""
    text_field: str = "text"
    """Field or column that holds the text in .jsonl, .parquet and .arrow files."""
    messages_field: str = "messages"
    """Field or column that holds the messages of conversations, in data without a text field. The loss is on the
    assistant's turns only."""
    chat_template: str | None = None
    """Jinja file or tokenizer_config.json with the template for conversations (default: beside --tokenizer)."""
    token_dtype: Literal["uint16", "uint32"] | None = None
    """dtype of token .bin files that have no sidecar (NAME.bin.json)."""
    tokenizer: str = "auto"
    """bytes, or the path or URL of a Hugging Face tokenizer.json; auto is that of --init-from, or bytes."""
    tokenize: Literal["cache", "stream"] = "cache"
    """cache: tokenize all text once, before training; stream: while reading, for corpora too large to cache."""
    batch_size: int | None = None
    """Rows per step, over all devices (default: those of the job's batch, or 16)."""
    num_tokens: int = 128
    """Tokens per row."""
    validation: float = 0.05
    """Fraction of the documents held out for evaluation."""
    epochs: int | None = None
    """Number of passes over the data (default: reshuffle and repeat forever)."""
    data_cache: str | None = None
    """Folder for tokenized data (default: meshwright/tokens in the user's cache)."""
    ledger: bool = False
    """Record the rows each step used, so that `meshwright ledger RUN` can check for lost or repeated rows."""


@dataclass(frozen=True)
class OptimizerOptions:
    """Optimizer and learning rate schedule."""

    optimizer: str | None = None
    """adamw, muon, adafactor, lion or sgd, or an optax optimizer (or a function from the number of steps to one) as
    module:attribute; its state is sharded like the parameters (default: the job's, or adamw)."""
    learning_rate: float = 3e-3
    """Peak learning rate, reached after the warmup."""
    schedule: str | None = None
    """Learning rate decay after the warmup: cosine, linear or constant; or a function from the step to the learning
    rate as module:attribute (default: the job's, or cosine)."""
    warmup: int = 20
    """Number of warmup steps."""
    final_learning_rate: float = 0.1
    """Final learning rate as a fraction of the peak."""
    weight_decay: float = 0.1
    """Weight decay for matrices; norms and biases are not decayed."""
    beta1: float = 0.9
    """Adam beta1, or SGD momentum. Muon's own momentum is 0.95."""
    beta2: float = 0.95
    """Adam beta2."""
    clip: float | None = 1.0
    """Maximum global gradient norm; None disables clipping."""


@dataclass(frozen=True)
class PlacementOptions:
    """Mesh, precision and memory."""

    mesh: str = "auto"
    """Mesh, e.g. dp:2,fsdp:2,tp:2; auto chooses one and prints the reason."""
    devices: int | None = None
    """CPU devices to simulate per process if there is no accelerator (default: 8 over all processes)."""
    view: Literal["auto", "local", "global"] = "auto"
    """local: Meshwright layers insert the collectives; global: XLA does; auto chooses one and prints the reason."""
    precision: Literal["auto", "float32", "mixed", "bfloat16", "fp8"] = "auto"
    """Precision of the step; auto is float32 on CPUs and mixed elsewhere. fp8 multiplies projections in fp8 (Hopper or
    newer; emulated elsewhere)."""
    fp8_matmuls: str | None = None
    """Regex of the parameters that --precision fp8 multiplies in fp8 (default: the projections of the layers)."""
    fp8_scaling: Literal["delayed", "current"] | None = None
    """Scales of inputs and gradients with --precision fp8: from the last steps, or from the tensors themselves
    (default: delayed)."""
    fp8_least_dim: int | None = None
    """Smallest dim of a matrix that --precision fp8 multiplies in fp8 (default: 256)."""
    remat: Literal["none", "dots", "full", "offload"] = "none"
    """Rematerialization policy for the backward pass."""
    minibatches: int = 1
    """Number of minibatches per step (gradient accumulation)."""
    sync: Literal["auto", "every", "hybrid", "once"] = "auto"
    """How often devices exchange gradients during accumulation."""
    pipeline: ScheduleName | None = None
    """Pipeline schedule, on a mesh with a pp axis (default: the job's, or gpipe); may change on resume."""
    pipeline_rounds: int | None = None
    """Stages per device with interleaved-1f1b and circular (default: 2)."""
    microbatches: int | None = None
    """Number of microbatches per minibatch in a pipeline (default: twice the number of stages)."""
    zero_axis: str | None = None
    """Mesh axis that also shards the optimizer state (ZeRO-1)."""
    pad: tuple[str, ...] = ()
    """Regexes of parameters whose dims may be padded with zeros if the mesh does not divide them."""
    overlap: bool = True
    """Set compiler options that overlap collectives with matmuls."""


@dataclass(frozen=True)
class RunOptions:
    """Length, checkpoints, evaluation and logging."""

    steps: int = 300
    """Total number of training steps."""
    run: str | None = None
    """Run folder, or a URL in an object store such as s3://BUCKET/NAME (default: the next free runs/MODEL-NUMBER)."""
    resume: bool = False
    """Resume the run in --run from its last good checkpoint."""
    or_start: bool = False
    """With --resume: start a new run if --run holds none yet, so that a scheduler can repeat one command."""
    cast: bool = False
    """Cast a checkpoint whose dtypes differ from --precision on resume."""
    seed: int = 0
    """Seed for parameters, dropout and data order."""
    checkpoint_every: int = 100
    """Steps between checkpoints; 0 saves only at the end."""
    keep_last: int = 3
    """Number of most recent checkpoints to keep."""
    keep_every: int | None = None
    """Also keep every checkpoint whose step is a multiple of this."""
    eval_every: int = 50
    """Steps between evaluations; 0 disables evaluation."""
    eval_batches: int = 4
    """Batches per evaluation, the same each time."""
    patience: int | None = None
    """Stop after this many evaluations in a row without improvement, and keep the best checkpoint (default: never)."""
    monitor: str = "loss:min"
    """Metric of the evaluation that --patience watches, as NAME:min or NAME:max."""
    log_seconds: float = 10.0
    """Seconds between progress lines when stderr is not a terminal."""
    sample_tokens: int = 160
    """Tokens to generate before and after training; 0 disables samples."""
    prompt: str = "def "
    """Prompt for the samples."""
    predict_rows: int = 16
    """Rows to predict before and after training, if the job has `predict`; 0 disables predictions."""
    report: bool = True
    """Write the report page at the end."""
    tensorboard: bool = True
    """Write TensorBoard event files."""
    wandb: str | None = None
    """Weights & Biases project to log to."""
    trackio: str | None = None
    """trackio project to log to."""
    compile_cache: str = "auto"
    """Folder in which JAX keeps compiled programs; auto: meshwright/compiled in the user's cache, but none for custom
    jobs on CPUs, and JAX's own setting if there is one; off: none."""
    profile: str | None = None
    """Steps to profile as FIRST:STOP, e.g. 10:15 for steps 10 to 14."""


@dataclass(frozen=True)
class SafetyOptions:
    """Skipped steps, loss spikes and hangs."""

    max_skipped: int = 5
    """Stop after this many skipped (non-finite) steps in a row."""
    rollback: float | None = None
    """Roll back and skip ahead in the data when the loss exceeds its recent median by this many robust standard
    deviations (try 8)."""
    hang: float = 600.0
    """Seconds without a step before the stacks of all threads are dumped; 0 disables the watchdog."""


@dataclass(frozen=True)
class ProcessOptions:
    """Multi-process runs; detected under mpirun and srun."""

    coordinator: str | None = None
    """host:port of process 0."""
    num_processes: int | None = None
    """Number of processes."""
    process_id: int | None = None
    """Rank of this process, starting at 0."""
    bind: str | None = None
    """Host for process 0 to listen on, if its machine does not have the coordinator's address; 0.0.0.0 is all
    (default: that address only)."""
