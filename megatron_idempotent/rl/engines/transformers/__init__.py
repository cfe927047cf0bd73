"""Runs an engine in this process on a model of transformers; it needs nothing else."""

from .engine import TransformersEngine

__all__ = ["TransformersEngine"]
