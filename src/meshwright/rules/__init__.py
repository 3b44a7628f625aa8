"""Partition rules (`rule_set`, or from `annotations`), matched against parameters and train states (`matching`)."""

from __future__ import annotations

import importlib
from typing import Any

from jax.sharding import PartitionSpec as P

from meshwright.rules.annotations import rules_from_annotations
from meshwright.rules.matching import LeafMatch, RuleMatches, get_weight_decay_mask, match_rules
from meshwright.rules.rule_set import Rule, Rules, as_rules, logical_rules
from meshwright.specs import get_names_from_partition_spec

__all__ = [
    "LeafMatch",
    "P",
    "Rule",
    "RuleMatches",
    "Rules",
    "as_rules",
    "get_names_from_partition_spec",
    "get_weight_decay_mask",
    "logical_rules",
    "match_partition_rules",
    "match_rules",
    "rules_from_annotations",
]


def __getattr__(name: str) -> Any:
    # It is defined one layer up, because it checks the specs as a layout does.
    if name == "match_partition_rules":
        return importlib.import_module("meshwright.layout").match_partition_rules
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
