"""Implements `completion`: scripts that complete commands, options and hazard ids in a shell.

`shtab` makes a script with all words from the parser, so that completing does not start Python.
Install the script again after an update of the package.
"""

from __future__ import annotations

import argparse
import importlib
import shlex
import sys
import typing
from collections.abc import Iterator

from megatron_idempotent import __version__
from megatron_idempotent.lazy import naming_the_remedy

_FILES = frozenset({"PATH", "FILE", "DIR", "FOLDER"})

#: Metavar → a mapping, or a function, with the words that complete it.
_NAMED = {
    "ID": "patching.catalog:hazards",
    "CHECK": "proof.certify.state_checks:EVERY",
    "LAYOUT": "proof.certify.layouts:LAYOUTS",
}

SHELLS = {
    "bash": "megatron-idempotent completion bash >> ~/.bashrc",
    "zsh": "megatron-idempotent completion zsh >> ~/.zshrc",
    "fish": "megatron-idempotent completion fish > ~/.config/fish/completions/"
    "megatron-idempotent.fish",
}
"""Maps a shell to the line that installs its script for new shells."""

# shtab's script for zsh registers its function only if it is evaluated.
_COMPINIT = "(( $+functions[compdef] )) || { autoload -Uz compinit && compinit -u; }\n"


def completion(shell: str, parser: argparse.ArgumentParser) -> int:
    """Print the script for a shell or, on a terminal, the line that installs it; return 0.

    Args:
        shell: a key of `SHELLS`.
        parser: the parser of all commands. The words that complete its arguments are added to it.

    Raises:
        ModuleNotFoundError: shtab is missing.
    """
    if sys.stdout.isatty():
        print(SHELLS[shell])
        return 0
    with naming_the_remedy("`megatron-idempotent completion`"):
        import shtab
    for action in list(_arguments(parser)):
        if action.choices is None and (words := _words(action)):
            action.choices = words
        elif action.metavar in _FILES:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    print(f"# Completion of megatron-idempotent {__version__}. For each new shell:")
    print(f"#     {SHELLS[shell]}")
    script = shtab.complete(parser, shell)
    print(f"{_COMPINIT}eval {shlex.quote(script)}" if shell == "zsh" else script)
    return 0


def _arguments(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _arguments(command)
        else:
            yield action


def _words(action: argparse.Action) -> tuple[str, ...]:
    """Return the words with which a shell completes a command-line argument: those of its metavar,
    such as the ids of hazards, or the allowed values of a trainer's setting; () if there are none.
    """
    if action.metavar == "SECTION.KEY=VALUE":
        return tuple(f"{name}=" for name in _settings())
    if action.metavar in _NAMED:
        module, _, name = _NAMED[str(action.metavar)].partition(":")
        words = getattr(importlib.import_module(f"megatron_idempotent.{module}"), name)
        return tuple(words() if callable(words) else words)
    section, _, key = action.dest.partition(".")
    return _settings().get(f"{section}.{key}", ()) if key else ()


def _settings() -> dict[str, tuple[str, ...]]:
    """Return setting → its allowed words, for the trainer's settings; () for numbers and texts."""
    from megatron_idempotent.rl.trainer import config

    return {
        f"{section}.{key}": tuple(map(str, typing.get_args(hint)))
        if typing.get_origin(hint) is typing.Literal
        else ()
        for section, kind in config.SECTIONS.items()
        for key, hint in typing.get_type_hints(kind).items()
    }
