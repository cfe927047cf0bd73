"""Runs engines in actors on a Ray cluster."""

from .engine import RayEngine

__all__ = ["RayEngine"]
