"""How a run was set up: its options, grouped and with what differs from the defaults, and its versions."""

from __future__ import annotations

import dataclasses
from typing import Any

from meshwright.loop.config import TrainConfig
from meshwright.loop.report.run_record import RunRecord
from meshwright.pages import Markup, Section, join, pairs, prose, tag


def config_section(run: RunRecord) -> Section:
    """Returns all options; those that are not at their defaults are set apart."""
    config = run.config
    if not config:
        text = _config_file(run)
        body = tag("pre", text, class_="quote") if text else prose("The configuration was not recorded.")
        return Section("Configuration", body)
    defaults = TrainConfig()
    groups: dict[str, dict[str, Any]] = {
        group.name: {
            item.name: getattr(getattr(defaults, group.name), item.name)
            for item in dataclasses.fields(getattr(defaults, group.name))
        }
        for group in dataclasses.fields(defaults)
    }
    blocks: list[Markup] = []
    changed = 0
    known: list[str] = []
    for group, options in groups.items():
        entries = []
        for name, default in options.items():
            if name not in config:
                continue
            known.append(name)
            same = _shown(config[name]) == _shown(default)
            changed += not same
            entries.append((name, _value(config[name]) if same else _changed(config[name], default)))
        if entries:
            blocks += [tag("h3", group.capitalize()), pairs(entries)]
    others = [(name, _value(value)) for name, value in config.items() if name not in known]
    if others:
        blocks += [tag("h3", "Other"), pairs(others)]
    differ = "option differs from its default and is" if changed == 1 else "options differ from their defaults and are"
    sentence = f"{changed} {differ} set in bold." if changed else "All options are at their defaults."
    return Section("Configuration", join([prose(sentence), *blocks]))


def versions_section(run: RunRecord) -> Section:
    """Returns the versions of what took part."""
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
        return (run.folder / "config.yaml").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
