"""An engine in this process, over a model of transformers: the one that needs nothing else."""

from .engine import TransformersEngine

__all__ = ["TransformersEngine"]
