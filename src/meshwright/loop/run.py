"""`train(config)`: from a configuration to a finished run, in the order of the flow.

mesh -> rules -> layout -> state -> step -> loop -> checkpoint
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import jax

from meshwright.checkpoint import Checkpoints, Keep
from meshwright.checkpoint.arrays import load_ahead
from meshwright.data import Ledger
from meshwright.distributed.agreement import from_first, together
from meshwright.errors import ConfigError, MeshwrightError
from meshwright.loop.config import TrainConfig
from meshwright.loop.fit import Loop, Result, fit
from meshwright.loop.logging.profiler import StepProfiler, parse_steps
from meshwright.loop.logging.progress import Progress
from meshwright.loop.logging.run_log import EVENTS, METRICS, RunLog
from meshwright.loop.logging.run_stats import (
    checkpoint_facts,
    flops_per_step,
    learning_rates,
    peak_flops,
    run_facts,
    tokens_per_step,
)
from meshwright.loop.resume import find_start, was_evaluated, was_sampled
from meshwright.loop.safety.preemption import Preemption
from meshwright.loop.safety.spike import SpikeGuard
from meshwright.loop.safety.watchdog import Watchdog
from meshwright.loop.sample import make_sampler
from meshwright.loop.setup import Prepared, Voice, prepare
from meshwright.loop.sources import StreamStart, TextSource
from meshwright.train import NonFiniteGuard, RunState, make_eval_step

TEMPERATURE = 0.7
"""How freely samples are drawn: a little more likely than what the model says, so that short training shows."""


def train(config: TrainConfig, *, say: Callable[[str], None] | None = None) -> Result:
    """Trains what a configuration describes, in a folder of its own, and returns how it ended.

    All processes of a run call it; process 0 writes and speaks.

    Args:
        say: where to tell what is done, instead of showing it on stderr with a line of progress.
    """
    config.check()
    _require_steps_to_trace(config)
    with ExitStack() as stack:
        run = prepare(config, Voice(say), stack)
        return _run(run, stack)


def _require_steps_to_trace(config: TrainConfig) -> None:
    # Not one of `check`: a file may name the steps to trace, and the command line more steps than the file.
    first, _ = parse_steps(config.run.profile)
    if first > config.run.steps:
        raise ConfigError(
            f"--profile {config.run.profile}: no such step comes, the run ends at step {config.run.steps}.",
            hint="name earlier steps, or ask for more with --steps.",
        )


def _run(run: Prepared, stack: ExitStack) -> Result:
    config, folder, options = run.config, run.folder, run.config.run
    preemption = stack.enter_context(Preemption())
    profile = StepProfiler(options.profile, folder.path / "profile") if options.profile else None
    sampler = _Sampler(run) if run.model is not None and options.sample_tokens else None

    def told(kind: str, step: int, text: str) -> None:
        log.event(kind, step, text)
        run.tell(text)

    keep = Keep(last=options.keep_last, every=options.keep_every)
    checkpoints = Checkpoints(folder.checkpoints, keep=keep, tell=told)
    load_ahead()
    begin = find_start(run, checkpoints)
    start = begin.step
    if start > options.steps:
        raise ConfigError(
            f"{folder.path} stands at step {start} of {options.steps} already.", hint="ask for more with --steps."
        )

    ledger = None
    if config.data.ledger:
        ledger = Ledger(folder.path / "ledger", tell=run.tell)
        stack.callback(ledger.close)

    def open_batches(data: Mapping[str, Any] | None, first_step: int) -> Any:
        return run.source.open(run.step, StreamStart(data, first_step, ledger), seed=options.seed)

    def reopen(undone: Mapping[str, Any], after: Mapping[str, Any], first_step: int) -> Any:
        if ledger is not None:
            row = int(undone["next_row"])
            ledger.skip(row, int(after["next_row"]) - row, why="the loss rose, and the run was rolled back")
        return open_batches(after, first_step)

    batches = open_batches(begin.data, start + 1)  # checks the data's state, so it comes before anything is changed
    stack.callback(batches.close)
    flops, peak = flops_per_step(run), peak_flops(run)

    def open_log() -> RunLog:
        with folder.writing():
            return RunLog(
                folder.path,
                rank=jax.process_index(),
                tensorboard=options.tensorboard,
                wandb=options.wandb,
                trackio=options.trackio,
                tell=run.tell,
            )

    def write() -> None:
        with folder.writing():
            folder.write_config(config)
            folder.write_facts(run_facts(run, flops, peak))

    log = stack.enter_context(together("opening its logs", open_log))
    stack.callback(checkpoints.close)
    together("writing its configuration", write)
    with folder.writing():
        begin.announce(run, log)
    if profile is not None and profile.stop <= start + 1:
        run.tell(f"no step of --profile {options.profile} comes: the run stands at step {start}")
    if sampler is not None and start == 0:
        sampler.show(begin.state, log, "before")

    progress = Progress(
        options.steps,
        start_step=start,
        tokens_per_step=tokens_per_step(run),
        stream=sys.stderr if run.tell.shows else None,
        plain_seconds=options.log_seconds,
    )
    stack.callback(progress.close)
    run.tell.progress = progress
    watchdog = None
    if config.safety.hang:
        watchdog = stack.enter_context(
            Watchdog(
                config.safety.hang,
                tell=lambda text: told("hang", progress.step, text),
                folder=folder.path,
                rank=jax.process_index(),
            )
        )
    run.tell(f"training from step {start} to {options.steps} in {folder.path}; the first step compiles")
    spikes = None
    if config.safety.rollback:
        spikes = SpikeGuard(factor=config.safety.rollback)
        if begin.spikes is not None:
            spikes.state = begin.spikes
    loop = Loop(
        step=run.step,
        num_steps=options.steps,
        log=log,
        progress=progress,
        checkpoints=checkpoints,
        checkpoint_every=options.checkpoint_every,
        facts=checkpoint_facts(run),
        evaluate=_make_evaluation(run),
        eval_every=options.eval_every,
        learning_rates=learning_rates(config),
        guard=NonFiniteGuard.for_layout(run.layout, limit=config.safety.max_skipped),
        preemption=preemption,
        watchdog=watchdog,
        profile=profile,
        spikes=spikes,
        reopen=reopen,
        counts_tokens=run.source.counts_tokens,
        tell=run.tell,
        evaluated_at=from_first(start if was_evaluated(folder.path / METRICS, start) else -1),
        flops_per_step=flops,
        peak_flops=peak,
    )
    sampled_at = from_first(start if was_sampled(folder.path / EVENTS, start) else -1)
    result = fit(loop, begin.state, batches)
    progress.close()
    run.tell.progress = None
    if sampler is not None and result.why != "preempted" and result.step != sampled_at:
        sampler.show(result.state, log, "after")
    _end(run, log, result)
    return result


def _make_evaluation(run: Prepared) -> Callable[[RunState], Mapping[str, float]] | None:
    count = run.config.run.eval_batches
    if not run.config.run.eval_every:
        return None
    step = make_eval_step(run.job, run.layout, view=run.config.placement.view, precision=run.precision)
    if run.source.evaluation(step, count) is None:
        run.tell(f"there is no evaluation: {run.source.why_no_evaluation}")
        return None

    def evaluate(state: RunState) -> Mapping[str, float]:
        batches = run.source.evaluation(step, count)
        assert batches is not None
        sums: dict[str, float] = {}
        weight = 0.0
        for batch in batches:
            found = {name: float(value) for name, value in jax.device_get(step(state, batch.arrays)).items()}
            tokens = found.pop("tokens", 1.0)
            weight += tokens
            for name, value in found.items():
                sums[name] = sums.get(name, 0.0) + tokens * value
        return {name: total / weight for name, total in sums.items()}

    return evaluate


class _Sampler:
    """Text that the model writes, before and after."""

    def __init__(self, run: Prepared) -> None:
        assert isinstance(run.source, TextSource)
        assert run.model is not None
        self.run = run
        self.tokenizer = run.source.tokenizer
        self.options = run.config.run
        self.prompt = self.tokenizer.encode(self.options.prompt)
        self.generate = make_sampler(
            run.model,
            window=len(self.prompt) + self.options.sample_tokens,
            precision=run.precision,
            vocab_size=self.tokenizer.vocab_size,
        )

    def show(self, state: RunState, log: RunLog, when: str) -> None:
        tokens = self.generate(
            state.params, self.prompt, self.options.sample_tokens, seed=self.options.seed, temperature=TEMPERATURE
        )
        text = self.tokenizer.decode(tokens)
        log.event("sample", int(state.step), text, prompt=self.options.prompt, when=when)
        shown = "".join(letter if letter.isprintable() or letter == "\n" else "\N{MIDDLE DOT}" for letter in text)
        self.run.tell(f"a sample {when} training:\n{_indented(self.options.prompt + shown)}")


def _end(run: Prepared, log: RunLog, result: Result) -> None:
    if jax.process_index() != 0:
        return
    loss = result.metrics.get("eval/loss")
    text = {
        "finished": f"finished at step {result.step}",
        "preempted": f"stopped at step {result.step}, as asked"
        + ("; its checkpoint is written" if result.saved else ""),
        "out of data": f"the data ended at step {result.step}",
    }[result.why]
    text += f"; evaluation loss {loss:.4f}" if loss is not None and result.why != "preempted" else ""
    more = {
        "preempted": "",
        "finished": f" --steps {2 * run.config.run.steps}",
        "out of data": f" --epochs {2 * (run.config.data.epochs or 1)}",
    }[result.why]
    problems = _problems(result)
    go_on = f"{run.folder.resume_command}{more if result.saved else ''}"
    kind = "error" if problems else "preempted" if result.why == "preempted" else "finish"
    log.event(kind, result.step, "; ".join([text, *problems]), go_on=go_on)
    run.tell(text)
    if run.config.run.report:
        log.flush()
        run.tell(_report(run))
    run.tell(f"to go on: {go_on}")
    for problem in problems:  # last, where it is seen
        run.tell(f"error: {problem}")


def _problems(result: Result) -> list[str]:
    """Returns why a run that came to its end did not end well."""
    problems = []
    if result.mostly_skipped:
        learned = "nothing was learned" if result.skipped == result.step else "little was learned"
        problems.append(
            f"{result.skipped} OF {result.step} STEPS WERE SKIPPED, since something was not finite: {learned}. A lower "
            "--learning-rate, or other data, may help"
        )
    if not result.saved:
        last = result.last_saved
        saved = f"step {last} is the last that is saved" if last is not None else "no step is saved"
        lost = f"those after it, up to {result.step}," if last is not None else f"all {result.step}"
        problems.append(f"step {result.step} COULD NOT BE SAVED: {saved}; {lost} exist nowhere")
    return problems


def _report(run: Prepared) -> str:
    """Writes the page, and says where it is; a page that cannot be written does not change how a run ended."""
    from meshwright.loop.report import build_report

    try:
        return f"report: {build_report(run.folder.path)}"
    except (MeshwrightError, OSError) as error:
        why = str(error).partition("\n")[0]
        command = f"meshwright report {shlex.quote(str(run.folder.path))} --out FILE"
        return f"warning: there is no report page: {why}\nhint: {command} writes it elsewhere."


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())
