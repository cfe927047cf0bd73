"""Implements `completion`: scripts that complete commands, options and hazard ids in a shell.

A script comes from the parsers, and has all words in it: a completion starts no Python. It is
printed again after an update of the package.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from megatron_idempotent import __version__
from megatron_idempotent.patching.catalog import hazards

_FILES = frozenset({"PATH", "FILE", "DIR", "FOLDER", "COMMAND"})

SHELLS = {
    "bash": "megatron-idempotent completion bash >> ~/.bashrc",
    "zsh": "megatron-idempotent completion zsh >> ~/.zshrc",
    "fish": "megatron-idempotent completion fish > ~/.config/fish/completions/"
    "megatron-idempotent.fish",
}
"""The line that installs the script of each shell, for shells to come."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """Holds an option of a command, or with no flags its positional argument.

    Example: `Slot(flags=("--device",), words=("cpu", "cuda"), file=False, takes=True, help="…")`.
    """

    flags: tuple[str, ...]
    words: tuple[str, ...]
    """The values that are offered."""
    file: bool
    """True if a value is a file or a folder."""
    takes: bool
    """True if a value follows the flag."""
    help: str


def completion(shell: str, parsers: Mapping[str, argparse.ArgumentParser | None]) -> int:
    """Print the script for a shell or, on a terminal, the line that installs it; return 0.

    Args:
        shell: a key of `SHELLS`.
        parsers: the parser of each command, None for one whose packages are missing; that of ""
            knows what each command is for.
    """
    if sys.stdout.isatty():
        print(SHELLS[shell])
        return 0
    commands = {name: slots(parser) for name, parser in parsers.items() if parser is not None}
    about = {name: "" for name in parsers if name} | _about(parsers[""])
    print(f"# Completion of megatron-idempotent {__version__}. For each new shell:")
    print(f"#     {SHELLS[shell]}")
    print(_fish(commands, about) if shell == "fish" else _bash(commands, about, zsh=shell == "zsh"))
    return 0


def slots(parser: argparse.ArgumentParser) -> list[Slot]:
    """Return the options and the positional arguments of a parser."""
    return [
        Slot(
            flags=tuple(action.option_strings),
            words=_words(action),
            file=action.metavar in _FILES,
            takes=action.nargs != 0,
            help=(action.help or "").partition(" (")[0] % {"default": action.default},
        )
        for action in parser._actions
        if action.help != argparse.SUPPRESS and not isinstance(action, argparse._SubParsersAction)
    ]


def _about(parser: argparse.ArgumentParser | None) -> dict[str, str]:
    """Return what each command is for."""
    assert parser is not None
    return {
        each.dest: each.help or ""
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
        for each in action._choices_actions
    }


def _words(action: argparse.Action) -> tuple[str, ...]:
    """Return the values that an argument may have: its choices, or those of its metavar."""
    if action.choices is not None:
        return tuple(map(str, action.choices))
    named = _NAMED.get(str(action.metavar))
    if named is not None:
        return tuple(named())
    section, _, key = action.dest.partition(".")
    return _settings().get(f"{section}.{key}", ()) if key else ()


def _checks() -> Sequence[str]:
    from megatron_idempotent.proof.certify.state_checks import EVERY

    return tuple(EVERY)


def _layouts() -> Sequence[str]:
    from megatron_idempotent.proof.certify.layouts import LAYOUTS

    return tuple(LAYOUTS)


def _scenarios() -> Sequence[str]:
    from megatron_idempotent.rl.simulator.__main__ import shipped

    return shipped()


def _settings() -> dict[str, tuple[str, ...]]:
    """Return the words that each setting of the trainer may be, none for one that is no word."""
    from megatron_idempotent.rl.trainer import config

    found = {}
    for section, kind in config.SECTIONS.items():
        for key, hint in typing.get_type_hints(kind).items():
            words = typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else ()
            found[f"{section}.{key}"] = tuple(map(str, words))
    return found


_NAMED: dict[str, Callable[[], Sequence[str]]] = {
    "ID": lambda: tuple(hazards()),
    "CHECK": _checks,
    "LAYOUT": _layouts,
    "SCENARIO": _scenarios,
    "SECTION.KEY=VALUE": lambda: [f"{name}=" for name in _settings()],
}


_BASH = """\
_megatron_idempotent() {
    local cur="${COMP_WORDS[COMP_CWORD]}" prev="${COMP_WORDS[COMP_CWORD-1]}" words= flags= kind=
    if [[ $cur == "=" ]]; then cur=
    elif [[ $prev == "=" ]]; then prev="${COMP_WORDS[COMP_CWORD-2]}"; fi
    if (( COMP_CWORD == 1 )); then TOP
    else case "${COMP_WORDS[1]} $prev" in
CASES
    esac; fi
    if [[ $cur == -* || -z $words$kind ]]; then words="$flags"; fi
    COMPREPLY=($(compgen -W "$words" -- "$cur"))
    if [[ $kind == file && $cur != -* ]]; then
        compopt -o filenames 2>/dev/null
        local IFS=$'\\n'
        COMPREPLY+=($(compgen -f -- "$cur"))
    elif [[ $kind == command ]]; then COMPREPLY+=($(compgen -c -- "$cur"))
    elif [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[*]} == *= ]]; then
        compopt -o nospace 2>/dev/null
    fi
}
complete -F _megatron_idempotent megatron-idempotent"""

_ZSH = """\
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit -u; }
autoload -Uz bashcompinit && bashcompinit
"""


def _bash(
    commands: Mapping[str, Sequence[Slot]], about: Mapping[str, str], *, zsh: bool = False
) -> str:
    """Return the script of bash; zsh reads the same, after two lines of its own."""
    valued: dict[str, list[str]] = {}
    others = []
    for command, all_slots in commands.items():
        for slot in all_slots:
            if slot.takes and command:
                patterns = [f'"{command} {flag}"' for flag in slot.flags]
                valued.setdefault(_offer(slot.words, file=slot.file), []).extend(patterns)
        if command:
            others.append(f'    "{command} "*) {_offered(all_slots)} ;;')
    cases = [
        f"    {'|'.join(patterns)}) {offer} ;;" for offer, patterns in valued.items() if patterns
    ]
    cases.append('    "run --") kind=command ;;')
    top = f"{_offer(tuple(about))} {_offered(commands[''])}"
    script = _BASH.replace("TOP", top).replace("CASES", "\n".join([*cases, *others]))
    return (_ZSH if zsh else "") + script


def _offer(words: Sequence[str], *, file: bool = False) -> str:
    return f"words={shlex.quote(' '.join(words))}{' kind=file' if file else ''}"


def _offered(all_slots: Sequence[Slot]) -> str:
    """Return what is offered after a command: the words of its arguments, and its flags."""
    arguments = [slot for slot in all_slots if not slot.flags]
    flags = " ".join(flag for slot in all_slots for flag in slot.flags)
    words = [word for slot in arguments for word in slot.words]
    offer = _offer(words, file=any(slot.file for slot in arguments)) if arguments else ""
    return f"{offer} flags={shlex.quote(flags)}".strip()


def _fish(commands: Mapping[str, Sequence[Slot]], about: Mapping[str, str]) -> str:
    """Return the script of fish, which shows what each word means."""
    start = "complete -c megatron-idempotent"
    # Out of a function, because fish expands what stands in -a.
    told = (f"{hazard.id} {_quoted(hazard.summary)}" for hazard in hazards().values())
    lines = [
        "function __megatron_idempotent_ids",
        f"    printf '%s\\t%s\\n' {' '.join(told)}",
        "end",
        f"{start} -f",
        f'{start} -n "__fish_seen_subcommand_from run" -a "(__fish_complete_subcommand)"',
    ]
    for command, meaning in about.items():
        lines.append(f"{start} -n __fish_use_subcommand -a {command} -d {_quoted(meaning)}")
    for command, all_slots in commands.items():
        when = f"-n '__fish_seen_subcommand_from {command}'"
        when = when if command else "-n __fish_use_subcommand"
        for slot in all_slots:
            words = " ".join(slot.words)
            if slot.words == tuple(hazards()):
                words = "(__megatron_idempotent_ids)"
            parts = [f"-l {flag[2:]}" for flag in slot.flags if flag.startswith("--")]
            parts += [f"-s {flag[1:]}" for flag in slot.flags if not flag.startswith("--")]
            parts += [f"-a '{words}'"] if words else []
            parts += [f"-d {_quoted(slot.help)}"] if slot.flags else []
            parts += ["-r" if slot.file else "-x"] if slot.flags and slot.takes else []
            parts += ["-F"] if slot.file else []
            lines.append(" ".join([start, when, *parts]))
    return "\n".join(lines)


def _quoted(text: str) -> str:
    """Quote for fish, in which a quote within single quotes has a backslash."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
