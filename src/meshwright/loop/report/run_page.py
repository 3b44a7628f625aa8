"""`build_report`: the report page of a run, with its head and all sections."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

from meshwright.bounded_reader import read_bytes
from meshwright.errors import FileFormatError, MeshwrightError
from meshwright.loop.report.curves import loss_section, metrics_section, speed_section, time_spent_section
from meshwright.loop.report.event_timeline import events_section, samples_section
from meshwright.loop.report.goodput_section import goodput_section
from meshwright.loop.report.matmuls_section import matmuls_section
from meshwright.loop.report.placement_section import mesh_section, recorded_layout_section
from meshwright.loop.report.predictions_section import predictions_section
from meshwright.loop.report.run_record import RunRecord, read_run
from meshwright.loop.report.sources_section import sources_section
from meshwright.loop.report.story import ending, figures, loss_sentences, speed_sentences
from meshwright.loop.settings.config import TrainConfig
from meshwright.pages import Markup, Section, badge, command, headline, join, make_page, pairs, prose, tag, write_page


def build_report(run_folder: str | Path, *, out: str | Path | None = None) -> Path:
    """Writes the report page of a run and returns its path.

    The page is one HTML file that needs no network. Build it at any time, also during a run; it lists missing parts.

    Args:
        run_folder: folder that `meshwright train` wrote, e.g. runs/NAME.
        out: file or folder to write to (default: report.html in the run folder).

    Example:
        >>> import tempfile
        >>> from meshwright.loop.logging.run_log import RunLog
        >>> folder = tempfile.mkdtemp()
        >>> with RunLog(folder, tensorboard=False) as log:
        ...     log.metrics(1, {"loss": 5.5})
        >>> build_report(folder).name
        'report.html'
    """
    if out is not None and not str(out).strip():
        raise MeshwrightError("--out is empty.", hint="pass a file or a folder; is a shell variable unset?")
    run = read_run(run_folder)
    path = run.folder / "report.html" if out is None else Path(out)
    if path.is_dir():
        path /= "report.html"
    write_page(render(run, now=time.time()), path, hint="choose another file with --out.")
    return path


def render(run: RunRecord, *, now: float) -> str:
    """Returns the page of a run; `now` decides whether a silent run counts as still running."""
    sections = [
        loss_section(run),
        sources_section(run),
        metrics_section(run),
        predictions_section(run),
        samples_section(run),
        speed_section(run),
        goodput_section(run),
        time_spent_section(run),
        mesh_section(run),
        recorded_layout_section(run),
        matmuls_section(run),
        events_section(run),
        config_section(run),
        versions_section(run),
    ]
    made = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(now))
    return make_page(
        f"{run.name} · run report",
        head=_head(run, now=now),
        sections=[section for section in sections if section is not None],
        foot=f"Built by Meshwright on {made} from {run.folder.resolve().name}. This file needs no network.",
    )


def _head(run: RunRecord, *, now: float) -> Markup:
    end = ending(run, now=now)
    resume = run.facts.get("resume_command")
    go_on = None
    if resume:
        label = "Resume from the last checkpoint"
        if end.kind == "good":  # the run is complete, so offer its command with more steps or data
            label = "Train further from the last checkpoint"
            told = [event.get("go_on") for event in run.events if event["kind"] == "finish"]
            resume = told[-1] if told and isinstance(told[-1], str) else resume
        go_on = join([tag("h3", label), command(resume, label="the command that resumes this run")])
    title = [tag("p", "Run report", class_="eyebrow"), tag("h1", run.name, " ", badge(end.word, kind=end.kind))]
    text = prose(*loss_sentences(run)[:2], *speed_sentences(run)[:1], end.sentence)
    notes = tag("p", " ".join(run.notes), class_="note") if run.notes else None
    return join([*title, text, headline(figures(run)) if figures(run) else None, notes, go_on])


def config_section(run: RunRecord) -> Section:
    """Returns all options, with changed ones in bold."""
    config = run.config
    if not config:
        text = _config_file(run)
        body = tag("pre", text, class_="quote") if text else prose("The configuration was not recorded.")
        return Section("Configuration", body)
    blocks: list[Markup] = []
    changed = 0
    for group, options in dataclasses.asdict(TrainConfig()).items():
        entries = []
        for name, default in options.items():
            if name in config:
                same = _shown(config[name]) == _shown(default)
                changed += not same
                entries.append((name, _value(config[name]) if same else _changed(config[name], default)))
        if entries:
            blocks += [tag("h3", group.capitalize()), pairs(entries)]
    known = TrainConfig().flat()
    others = [(name, _value(value)) for name, value in config.items() if name not in known]
    if others:
        blocks += [tag("h3", "Other"), pairs(others)]
    differ = "option differs from its default and is" if changed == 1 else "options differ from their defaults and are"
    sentence = f"{changed} {differ} in bold." if changed else "All options have their default values."
    return Section("Configuration", join([prose(sentence), *blocks]))


def versions_section(run: RunRecord) -> Section:
    """Returns the versions of Python and the packages."""
    versions = run.facts.get("versions")
    if not versions:
        return Section("Versions", prose("The versions were not recorded."))
    return Section("Versions", pairs([(name, str(version)) for name, version in versions.items()]))


def _value(value: Any) -> Markup:
    return tag("span", _shown(value), class_="code")


def _changed(value: Any, default: Any) -> Markup:
    return tag("b", _shown(value), tag("small", f"default {_shown(default)}"), class_="code")


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value)) or "none"
    return str(value) if str(value) else '""'


def _config_file(run: RunRecord) -> str:
    try:
        return read_bytes(run.folder / "config.yaml", most=2**20).decode(errors="replace")
    except (OSError, FileFormatError):
        return ""
