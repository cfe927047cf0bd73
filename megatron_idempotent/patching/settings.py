"""Reads the environment variables that select patches, in `apply()` and not at import.

An operator who sets them may be unable to edit the program, so they override its arguments.
"""

from __future__ import annotations

import os

from .base import Record, UnknownPatchError

TYPE_CHECKING = False  # importing typing would cost what the index saves
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

SWITCH = "MEGATRON_IDEMPOTENT"
VARIABLES = {
    f"{SWITCH}": "0 turns every patch off, 1 applies them where the hook is installed",
    f"{SWITCH}_CHECK": "1 turns on the patches that only look",
    f"{SWITCH}_DISABLE": "ids of patches that are not applied",
    f"{SWITCH}_ONLY": "ids of patches, of which no others are applied",
    f"{SWITCH}_REBIND": "packages whose early-bound names are rebound too",
    f"{SWITCH}_REPORT": "file for the report, with {rank} filled in",
    f"{SWITCH}_STRICT": "1 makes a problem an error",
    f"{SWITCH}_VERIFY": "seconds in which all ranks must have patches that a hook applied; 0: any",
}
"""The variables that `apply()` reads, with their meanings, for all lists of them."""
_ELSEWHERE = frozenset(
    f"{SWITCH}_{name}"
    for name in (
        "DEVICE",  # of ranks that are started without one
        "TRITON",  # whether Triton's kernels run
        "BUCKET",  # the URL that vLLM's workers may read
        *("PEER_PYTHON", "RAY", "VLLM_PYTHON"),  # of this project's own tests and benchmarks
    )
)
ON, OFF = frozenset({"1", "true", "on", "yes"}), frozenset({"0", "false", "off", "no"})
"""The values of a switch, in upper or lower case."""


class Settings(Record):
    """Holds the checked values of environment variables that begin with `MEGATRON_IDEMPOTENT`."""

    enabled: bool
    """`MEGATRON_IDEMPOTENT=0` turns every patch off."""
    disable: frozenset[str]
    """`MEGATRON_IDEMPOTENT_DISABLE=id,…`: patches that are never applied."""
    only: frozenset[str] | None
    """`MEGATRON_IDEMPOTENT_ONLY=id,…`: the only patches to apply; None if unset or blank."""
    strict: bool
    """`MEGATRON_IDEMPOTENT_STRICT=1`: a problem raises instead of being recorded."""
    debug: bool
    """`MEGATRON_IDEMPOTENT_CHECK=1`: turns on the patches that only check."""
    rebind: frozenset[str]
    """`MEGATRON_IDEMPOTENT_REBIND=pkg,…`: packages, besides megatron, whose early-bound names of a
    patched function are rebound too."""
    report_path: str | None
    """`MEGATRON_IDEMPOTENT_REPORT=path.json`: path of the report; `{rank}` becomes the rank."""
    verify_within: float
    """`MEGATRON_IDEMPOTENT_VERIFY=600`: seconds that the first training call waits until all ranks
    have reported their patches, if a hook has applied them; 0 turns this check off."""
    unknown: tuple[str, ...]
    """Sentences about unknown variables with this prefix, such as misspelt ones."""


def read(known_ids: Iterable[str], environ: Mapping[str, str] | None = None) -> Settings:
    """Return the `Settings` in `environ`, by default the environment variables of this process.

    Raises:
        UnknownPatchError: no case file has an id.
        ValueError: a switch is neither on nor off, the list of `_ONLY` names nothing, or a name of
            `_REBIND` is no package.
    """
    # Not the argument's default, which would be pickled with this function if that is by value.
    environ = os.environ if environ is None else environ
    known_ids = tuple(known_ids)
    return Settings(
        enabled=switch(environ, SWITCH, default=True),
        disable=_ids(environ, f"{SWITCH}_DISABLE", known_ids),
        only=_only(environ, f"{SWITCH}_ONLY", known_ids),
        strict=switch(environ, f"{SWITCH}_STRICT", default=False),
        debug=switch(environ, f"{SWITCH}_CHECK", default=False),
        rebind=_packages(environ, f"{SWITCH}_REBIND"),
        report_path=environ.get(f"{SWITCH}_REPORT") or None,
        verify_within=_seconds(environ, f"{SWITCH}_VERIFY", default=600.0),
        unknown=tuple(_unknown(environ)),
    )


def _seconds(environ: Mapping[str, str], variable: str, *, default: float) -> float:
    text = environ.get(variable, "").strip()
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if 0 <= value < float("inf"):
        return value
    raise ValueError(
        f"{variable}={environ[variable]!r} is no number of seconds: set it to 0 or more"
    )


def looks(environ: Mapping[str, str] | None = None) -> bool:
    """Return True if the environment variable `MEGATRON_IDEMPOTENT_CHECK` turns on checks that cost
    time.
    """
    return switch(os.environ if environ is None else environ, f"{SWITCH}_CHECK", default=False)


def check_ids(ids: Iterable[str], source: str, known_ids: Iterable[str]) -> frozenset[str]:
    """Check that each patch id is known; return the ids as a set. `source` is the argument or
    variable with the ids, for the message.

    Raises:
        TypeError: `ids` is one string or no iterable, or holds something that is not a string.
        UnknownPatchError: an id is not in `known_ids`; the message has the nearest ones.
    """
    if isinstance(ids, str):
        raise TypeError(f"{source} takes several ids, got the string {ids!r}: write [{ids!r}]")
    if not hasattr(type(ids), "__iter__"):
        raise TypeError(
            f"{source} takes a list of patch ids, got {ids!r}: write [] for none, or leave it out"
        )
    ids, known_ids = list(ids), tuple(known_ids)
    for patch_id in ids:
        if not isinstance(patch_id, str):
            raise TypeError(f"{source} takes patch ids (str), got {patch_id!r}")
        if patch_id not in known_ids:
            raise UnknownPatchError(unknown_id(patch_id, source, known_ids))
    return frozenset(ids)


def unknown_id(patch_id: str, source: str, known_ids: tuple[str, ...]) -> str:
    """Return the error message for an unknown patch id in `source`, with the nearest known ids."""
    from .catalog import hazards

    listing = "`megatron-idempotent explain` lists them"
    if patch_id in hazards():
        return (
            f"{source} names {patch_id!r}, a hazard that no patch repairs; its answer: "
            f"{hazards()[patch_id].answer}. {listing}"
        )
    hint = did_you_mean(patch_id, known_ids)
    return (
        f"{source} names {patch_id!r}, which is none of the {len(known_ids)} ids.{hint} {listing}"
    )


def did_you_mean(name: str, known_names: Iterable[str]) -> str:
    """Return " Did you mean 'x' or 'y'?", with the known names nearest to an unknown one, or ""."""
    from difflib import get_close_matches

    known_names, text = tuple(known_names), name.strip().lower().replace("_", "-")
    with_word = [candidate for candidate in known_names if text and f"-{text}" in f"-{candidate}"]
    near = list(dict.fromkeys([*get_close_matches(text, known_names, n=3), *with_word]))[:3]
    return f" Did you mean {' or '.join(map(repr, near))}?" if near else ""


def _ids(environ: Mapping[str, str], variable: str, known_ids: tuple[str, ...]) -> frozenset[str]:
    return check_ids(_split(environ.get(variable, "")), variable, known_ids)


def _only(
    environ: Mapping[str, str], variable: str, known_ids: tuple[str, ...]
) -> frozenset[str] | None:
    if not environ.get(variable, "").strip():
        return None
    chosen_ids = _ids(environ, variable, known_ids)
    if not chosen_ids:  # it would turn everything off, which is what `MEGATRON_IDEMPOTENT=0` is for
        raise ValueError(
            f"{variable}={environ[variable]!r} names no patch: name one, unset it to apply all, or "
            f"set {SWITCH}=0 to apply none"
        )
    return chosen_ids


def _packages(environ: Mapping[str, str], variable: str) -> frozenset[str]:
    names = _split(environ.get(variable, ""))
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise ValueError(
                f"{variable}={environ[variable]!r} names {name!r}, which is no package: write "
                "names as in an import statement, with commas between them"
            )
    return frozenset(names)


def _unknown(environ: Mapping[str, str]) -> Iterator[str]:
    for name in sorted(environ):
        if not name.startswith(SWITCH) or name in VARIABLES or name in _ELSEWHERE:
            continue
        from difflib import get_close_matches

        # All variables have one prefix, so the rest of the name is compared.
        by_suffix = {variable.removeprefix(SWITCH): variable for variable in VARIABLES}
        near = get_close_matches(name.removeprefix(SWITCH), by_suffix, n=1)
        hint = (
            f"did you mean {by_suffix[near[0]]}?" if near else f"known are {', '.join(VARIABLES)}"
        )
        yield f"{name} is set and means nothing: {hint}"


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def switch(environ: Mapping[str, str], variable: str, *, default: bool) -> bool:
    """Return True if `variable` is on in `environ`, and False if it is off.
    Return `default` if the variable is unset or blank.

    Raises:
        ValueError: the variable's value is neither of `ON` nor of `OFF`.
    """
    value = environ.get(variable, "").strip().lower()
    if not value:
        return default
    if value in ON | OFF:
        return value in ON
    raise ValueError(f"{variable}={environ[variable]!r} is neither on nor off: set it to 1 or 0")
