"""Generating text on any mesh, with a cache: keys and values of attention, the state of an mLSTM."""

from __future__ import annotations

from meshwright.lazy import lazy_names

_WHERE = {
    "make_generator": "generator",
    "Generator": "generator",
    "Stream": "generator",
    "Scores": "generator",
    "Sampling": "draw",
    "Weights": "loaded_weights",
    "generate_text": "text",
    "Completion": "text",
}

__all__ = [*_WHERE]

__getattr__ = lazy_names(__name__, {name: f"meshwright.generate.{module}" for name, module in _WHERE.items()})
