"""The records of a case file in `patches/`: a hazard, its releases, and its remedy.

A `Patch` repairs it from outside; a `Helper` names the function that the caller has to use instead,
where no wrapper can know enough; a `Limit` only says what to keep away from.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from .frozen import NOTHING, Record
from .groups import GROUPS
from .outline import Place, specifier

if TYPE_CHECKING:
    from .source import Body

SECTIONS = ("Symptom", "Cause", "Affects", "Upstream", "Remove when")


class Target(Place):
    """One function of Megatron and the wrapper that goes around it.

    Example:
        Target(
            address="megatron.training.training:train",
            wrapper=train,                       # train(original, *args, **kwargs)
            relies_on=("timers('interval-time', log_level=0).start(barrier=True)",),
        )
    """

    wrapper: Callable[..., Any]
    """Plain module-level function `wrapper(original, *args, **kwargs)`."""

    reviewed: Mapping[str, str] = NOTHING
    """Body hash → the releases on which a person read that body. Any of them may be wrapped."""

    relies_on: tuple[str, ...] = ()
    """Source fragments that a body nobody reviewed must contain for the wrap to be right. What else
    it does with the same attributes, texts and names is its part: see `parts`."""

    parts: Mapping[str, str] = NOTHING
    """Hash of a part (`engine.part`) → the releases on which a person read it. Where this is empty,
    as for frameworks that nobody reads release by release, the fragments alone decide."""

    early_users: tuple[str, ...] = ()
    """Modules that call the function while they are imported, as a decorator's maker is. One that
    was imported before the wrapper came keeps what it made, and the report says so."""

    def __post_init__(self) -> None:
        if not _is_address(self.address):
            raise ValueError(f"target address {self.address!r} is not 'module:qualname'")
        if not self.reviewed and not self.relies_on:
            raise ValueError(
                f"target {self.address} has neither reviewed bodies nor relies_on, so nothing "
                "would notice that upstream changed: give one of them"
            )
        if self.parts and not self.relies_on:
            raise ValueError(f"target {self.address} has parts of nothing: give relies_on too")


class Reproduction(Record):
    """A program that shows the hazard, and its absence, on CPU ranks with the real Megatron."""

    run: Callable[[], None]
    """Module-level function, called on every rank; returns where all is well, raises where not."""

    repaired: Callable[[], None] | None = None
    """The same with the helper's remedy in use; None where the patches alone repair `run`."""

    neighbour: Callable[[], object] | None = None
    """A right program beside the hazard, which stock runs and the patches must leave as it is.

    Module-level function, called on every rank, stock and patched. It raises where stock gets the
    program wrong, and returns what has to be the same to the bit: bytes, numbers, strings, or lists
    of them. Each patch that can raise has one, and each helper.
    """

    helped: Callable[[], object] | None = None
    """The neighbour with a helper in use; None where patches alone are the remedy."""

    ranks: int
    """Number of ranks that `run` is called on."""

    stock_error: str
    """Regular expression that the error on stock Megatron must match, `Type: message`."""


class Hazard(Record):
    """One thing that goes wrong. The docstring of the declaring module is the case file."""

    id: str
    """Kebab-case, named for the symptom; the file has the same name with underscores."""

    summary: str
    """One line for the tables: what goes wrong on stock Megatron."""

    since: str
    """First release of `distribution` that is affected, such as `0.12`."""

    before: str
    """First release that is not affected, or `UNTRIED`. The range only selects; bodies decide."""

    upstream: str
    """Public link to the upstream code, issue or pull request that shows the hazard."""

    reproduction: Reproduction
    """Run by `megatron-idempotent prove`."""

    distribution: str = "megatron-core"
    """The package whose releases `since` and `before` speak of."""

    def __post_init__(self) -> None:
        if not _is_kebab(self.id):
            raise ValueError(f"patch id {self.id!r} is not kebab-case")
        if not self.upstream.startswith("https://"):
            raise ValueError(f"patch {self.id} links nothing upstream: {self.upstream!r}")
        for bound in (self.since, self.before):
            if not _is_release(bound):
                raise ValueError(f"patch {self.id}: {bound!r} is no release like 0.12")

    @property
    def versions(self) -> str:
        """The range as a version specifier."""
        return specifier(self.since, self.before)

    @property
    def answer(self) -> str:
        """The remedy for the hazard, for the tables."""
        raise NotImplementedError

    @property
    def case_file(self) -> dict[str, str]:
        """The sections of the declaring module's docstring, headline under the empty name."""
        import re

        module = sys.modules[self.reproduction.run.__module__]
        doc = module.__doc__ or _docstring(module)
        parts = re.split(rf"^({'|'.join(SECTIONS)}):", doc, flags=re.MULTILINE)
        sections = {"": parts[0].strip()}
        for name, text in zip(parts[1::2], parts[2::2], strict=True):
            sections[name] = "\n".join(line.strip() for line in text.strip().splitlines())
        return sections


class Patch(Hazard):
    """A hazard that wrappers around Megatron's functions repair."""

    targets: tuple[Target, ...]
    """The wrapped functions: all of them or none."""

    fixed_when: Callable[[Mapping[str, Body]], bool] | None = None
    """Probe over the bodies by target address: True where upstream no longer needs the patch."""

    default: bool = True
    """False where it was never run, for want of the hardware, or costs: applied only if named."""

    groups: tuple[str, ...] = ()
    """Names in `engine.groups` of what it takes this patch and others for."""

    debug: bool = False
    """True if it only looks, so that `MEGATRON_IDEMPOTENT_CHECK=1` switches it on too."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.targets:
            raise ValueError(f"patch {self.id} has no target")
        unknown = [name for name in self.groups if name not in GROUPS]
        if unknown:
            raise ValueError(f"patch {self.id} is of no group {unknown}: known are {[*GROUPS]}")
        if self.default and self.debug:
            raise ValueError(f"patch {self.id} only looks, and has to be off by default")

    @property
    def answer(self) -> str:
        """The switch that turns it on, for the tables."""
        return "patch" if self.default else "patch, off by default"


class Helper(Hazard):
    """A hazard that only the caller can avoid, by calling a function of this package."""

    call: str
    """Name of the function in `megatron_idempotent`, such as `ensure_params_synced`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reproduction.repaired is None:
            raise ValueError(f"helper {self.id} does not show its remedy: give repaired=")
        if self.reproduction.helped is None or self.reproduction.neighbour is None:
            raise ValueError(
                f"helper {self.id} shows no right program that it leaves alone: give neighbour= "
                "and helped="
            )

    @property
    def answer(self) -> str:
        """The function to call, for the tables."""
        return f"`{self.call}`"


class Limit(Hazard):
    """A hazard that nothing here repairs: its case file says what to keep away from."""

    @property
    def answer(self) -> str:
        """Nothing to call."""
        return "documented limit"


def _docstring(module: Any) -> str:
    """Read a module's docstring out of its source: `python -OO` strips it from the module."""
    import ast
    import inspect

    return ast.get_docstring(ast.parse(inspect.getsource(module)), clean=False) or ""


def _is_address(text: str) -> bool:
    module, colon, qualname = text.partition(":")
    return bool(colon) and all(
        name.isidentifier() for name in (*module.split("."), *qualname.split("."))
    )


def _is_kebab(text: str) -> bool:
    return text.isascii() and all(
        part.isalnum() and part == part.lower() for part in text.split("-")
    )


def _is_release(text: str) -> bool:
    return text.isascii() and all(part.isdecimal() for part in text.split("."))
