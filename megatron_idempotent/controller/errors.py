"""Errors that end a run of the controller, or one of its groups."""

from __future__ import annotations


class ControllerError(RuntimeError):
    """A run that cannot go on. Everything up to the last checkpoint is kept."""


class SettingsError(ValueError):
    """Settings that cannot work; the message names the setting, its value and what is allowed."""


class Stalled(ControllerError):
    """Nothing has made progress for as long as the settings allow, and work remains."""


class StepFailed(ControllerError):
    """An optimizer step that failed as often as the settings allow; it was undone each time."""


class PublishFailed(ControllerError):
    """Weights that could not be read or sent, as often as the settings allow, though engines are
    there to take them."""


class EnginesLost(RuntimeError):
    """No engine is left to sample, or to take new weights; the message says why, by engine."""


class PoisonedPrompt(ValueError):
    """A prompt that can never be answered; its group is dropped and reported."""
