"""Defines the records of a case file in `patches/`: hazard, releases, remedy, groups.

A `Patch` repairs a hazard by wrapping upstream's functions. A `Helper` names a function that the
caller has to call, because a wrapper lacks the information. A `Limit` only documents the hazard.

Each member of a group repairs a hazard of its own, and works if another member is missing, so a
group may be applied in part. But a program that relies on the group's promise then meets the hazard
of the missing member.

A record holds only what its module cannot tell. The rest comes from that module: the hazard's id
is the file's name, its programs are the functions `reproduce`, `repaired`, `control` and
`helped`, and its docstring is the case file, with the link to upstream.

`reviewed.txt` lists the bodies of upstream's functions that a person has read. It is one file for
all patches, so that a new release of Megatron changes this file and no case file. A line names a
function; the lines below it have the hashes of its bodies with their releases; below each body are
the patches for which it was reviewed, because a review for one wrapper does not cover another one.
A part is reviewed for one patch, too.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .base import (
    MEGATRON,
    NOTHING,
    OLDEST,
    OPEN,
    UNTRIED,
    IndexEntry,
    Place,
    Record,
    generated,
    specifier,
)
from .rows import COVERED, PROBLEMS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .evidence import Bodies
    from .rows import Row


Original = Callable[..., Any]
"""The type of a wrapper's first argument: upstream's function, or another patch's wrapper."""


def arguments(original: Original, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Bind a call's arguments to the signature of `original`. Return them by parameter name,
    defaults included.

    Raises:
        TypeError: the call does not fit the signature; the same error that upstream would raise.
    """
    import inspect  # here, because apply() before Megatron's import does not use it

    call = inspect.signature(original).bind(*args, **kwargs)
    call.apply_defaults()
    return call.arguments


class PatchGroup(Record):
    """Describes a promise to the user that holds only if all patches of a group are applied."""

    promise: str
    """The promise, as a sentence."""
    instead: str
    """The advice if a member is missing, as a request."""


GROUPS: Mapping[str, PatchGroup] = {
    "train-again": PatchGroup(
        promise="train() can be called again, and k calls are as one long call",
        instead="call train() once in a process",
    ),
    "overlap": PatchGroup(
        promise="overlapped reductions and gathers are right for any sequence of windows",
        instead="leave overlap_grad_reduce and overlap_param_gather off",
    ),
    "abort": PatchGroup(
        promise="after an exception the next step is right",
        instead="end the ranks after an exception, and resume from a checkpoint",
    ),
    "offload": PatchGroup(
        promise="offloaded gradient buffers lose nothing, or say so",
        instead="offload gradient buffers after a step only, and restore them before zeroing them",
    ),
    "aux-loss": PatchGroup(
        promise="auxiliary losses and expert biases do not depend on how a step is cut",
        instead="make one schedule call of the same number of microbatches per step",
    ),
    "deferred-embedding": PatchGroup(
        promise="a deferred embedding gradient is in the step that it belongs to",
        instead="leave defer_embedding_wgrad_compute off",
    ),
    "layer-wise": PatchGroup(
        promise="forwards around a step of the layer-wise optimizer see and change nothing",
        instead="leave overlap_param_gather off with the layer-wise optimizer",
    ),
    "loss-scale": PatchGroup(
        promise="gradients are multiplied and divided by the loss scale once",
        instead="train in bf16 or float32",
    ),
    "generation": PatchGroup(
        promise="generation in the process that trains leaves the training as it was",
        instead="generate in another process",
    ),
}

#: Facts about a patched Megatron that library code depends on; a patch `provides` them.
PROVIDED: Mapping[str, str] = {
    "schedules-ask-windows": "a schedule that is called to train asks the window that is open",
    "gathers-watched": "parameters that wait for an overlapped gather are known",
    "layer-wise-gathers-watched": "the same for the layer-wise optimizer",
    "list-gathers-watched": "the same for gathers by lists of parameters",
    "deferred-embedding-drained": "a deferred embedding gradient takes one microbatch, too",
    "deferred-embedding-ordered": "it is computed before its bucket is reduced",
    "deferred-embedding-paired": "with MTP it is made of inputs and gradients of the same calls",
    "forward-only-counts-nothing": "a forward-only schedule counts no tokens for expert biases",
    "aux-losses-count-all-tokens": "per token, auxiliary losses count all of a sequence's tokens",
    "expert-bias-knows-padding": "a router with an expert bias takes a padding mask",
    "output-processor": "a GPTModel takes an output_processor",
}

_BY_HAND = "named in "


def incomplete(rows: Iterable[Row], patches: Mapping[str, Patch]) -> list[str]:
    """Return a sentence for each group of patches of which only a part is applied.
    The sentence says what is missing, the effect and the remedy.

    A patch that this Megatron does not need, or that `only=` leaves out, does not count as missing.
    """
    statuses = {row.id: row for row in rows}
    absent = {
        row.id
        for row in statuses.values()
        if row.status in PROBLEMS or (row.status == "disabled" and row.reason.startswith(_BY_HAND))
    }
    sentences = []
    for name, group in GROUPS.items():
        members = [patch for patch in patches.values() if name in patch.groups]
        missing = [patch for patch in members if patch.id in absent]
        if not missing or not any(statuses[patch.id].status in COVERED for patch in members):
            continue
        missing_text = "; ".join(
            f"{patch.id} is {statuses[patch.id].status} ({patch.summary})" for patch in missing
        )
        sentences.append(
            f"group {name} is not whole ({group.promise}): {missing_text}. Without it "
            f"{group.instead}"
        )
    return sentences


SECTIONS = ("Symptom", "Cause", "Affects", "Upstream", "Remove when")

FAULT = "Fault: "
"""The error that `reproduce` raises if it detects the hazard by a check of its own."""

#: How a hazard shows in a run → the meaning of that word.
LOUDNESS: Mapping[str, str] = {
    "silent": "a run goes on, and no error says that it is wrong",
    "loud": "a run ends in an error, dies, or waits for ever",
    "both": "one or the other, as the symptom says",
}


class Target(Place):
    """Names one function of Megatron, and the wrapper that goes around it.

    Example:
        Target(
            "megatron.training.training:train",
            train,                       # train(original, *args, **kwargs)
            "timers('interval-time', log_level=0).start(barrier=True)",
        )
    """

    wrapper: Callable[..., Any]
    """Plain module-level function `wrapper(original, *args, **kwargs)`."""

    reviewed: Mapping[str, str] = NOTHING
    """Body hash → the releases with that body, which a person has reviewed; by default from
    `reviewed.txt`, for the address and the patch. The patch is applied to each of these bodies."""

    relies_on: tuple[str, ...] = ()
    """Source fragments that an unreviewed body must contain for the wrapper to fit. All statements
    that use the same attributes, texts and names are the body's part: see `parts`."""

    parts: Mapping[str, str] = NOTHING
    """Hash of a part (`patching.contract`) → the releases with that part, which a person has
    reviewed; by default from `reviewed.txt`. If this is empty, as for frameworks, whose releases
    are not reviewed one by one, the fragments alone decide."""

    early_users: tuple[str, ...] = ()
    """Modules that call the function while they are imported, for example to make a decorator. If
    one was imported before the wrapper was installed, it keeps the unpatched result, and the
    report says so."""

    def __init__(
        self,
        address: str,
        wrapper: Callable[..., Any],
        *relies_on: str,
        reviewed: Mapping[str, str] = NOTHING,
        parts: Mapping[str, str] = NOTHING,
        early_users: tuple[str, ...] = (),
    ) -> None:
        values = vars()
        super().__init__(**{name: values[name] for name in self._fields})

    def __post_init__(self) -> None:
        if not _is_address(self.address):
            raise ValueError(
                f"target address {self.address!r} is not 'module:qualname': write it like "
                "'megatron.training.training:train'"
            )
        if self.parts and not self.relies_on:
            raise ValueError(f"target {self.address} has parts of nothing: give fragments too")

    def at(self, homes: Mapping[str, str]) -> Target:
        """Return a copy of the target with the address to which upstream has moved the function.
        `homes` maps old addresses to new ones; if it lacks the target's, return the target itself.
        """
        home = homes.get(self.address)
        if home is None:
            return self
        moved = object.__new__(Target)
        vars(moved).update(vars(self), address=home)
        return moved

    def label(self, body_hash: str) -> str:
        """Return the releases in which the function has the body with this hash, if a person has
        reviewed that body, for this patch or another; "" otherwise.

        Example: `target.label("0123456789ab") == "0.12.0 to 0.15.3"`.
        """
        labels = reviewed().bodies.get(self.address, NOTHING)
        return self.reviewed.get(body_hash) or labels.get(body_hash, "")


class Hazard(Record):
    """Describes one defect of upstream, which the docstring of the declaring module explains.

    The functions of that module show the hazard, and its absence, with the real Megatron on CPU
    ranks.
    """

    summary: str
    """One line for the tables: what goes wrong on stock Megatron."""

    stock_error: str = FAULT
    """Regular expression that the error of `reproduce` on stock Megatron must match, `Type:
    message`; by default a `Fault`, which `reproduce` raises if it detects the hazard itself."""

    loudness: str = ""
    """One of `LOUDNESS`: how the hazard shows in a run; by default `loud` if `stock_error` is
    upstream's own error, else `silent`."""

    distribution: str = ""
    """The distribution whose releases `since` and `before` name; by default that of the first
    target."""

    since: str = ""
    """First release that is affected; by default the oldest megatron-core that is supported."""

    before: str = ""
    """First release that is not affected; by default upstream has not repaired the hazard. The
    range only selects; bodies decide."""

    ranks: int = 2
    """Number of ranks that the programs are called on."""

    given: tuple[str, ...] = ()
    """Ids of patches that are also applied for the stock run: without them `reproduce` fails before
    it reaches this hazard."""

    needs: tuple[str, ...] = ()
    """Packages that upstream's code imports in `reproduce`, and that upstream does not declare."""

    module: str = ""
    """The module that declares the hazard, by default the one that makes the record."""

    id: str = ""
    """The hazard's name in kebab-case, for its symptom; by default the name of the module's file,
    which has it with underscores."""

    def __post_init__(self) -> None:
        if not self.module:
            self.__dict__["module"] = _declaring_module()
        if not self.id:
            self.__dict__["id"] = self.module.rpartition(".")[2].replace("_", "-")
        if not _is_kebab(self.id):
            raise ValueError(
                f"patch id {self.id!r} is not kebab-case: write it like 'train-interval-timer'"
            )
        if not self.loudness:
            self.__dict__["loudness"] = "silent" if self.stock_error == FAULT else "loud"
        if self.loudness not in LOUDNESS:
            raise ValueError(
                f"{self.id} has loudness={self.loudness!r}; allowed: {', '.join(LOUDNESS)}"
            )
        if not self.distribution:
            module = next((package.module for package in getattr(self, "targets", ())), "")
            packages = (module.partition(".")[0], ".".join(module.split(".")[:2]))
            distributions = [_FRAMEWORKS[package] for package in packages if package in _FRAMEWORKS]
            self.__dict__["distribution"] = distributions[0] if distributions else MEGATRON
        if self.distribution == MEGATRON:
            self.__dict__["since"] = self.since or OLDEST
        if not self.before:
            self.__dict__["before"] = UNTRIED if self.distribution == MEGATRON else OPEN
        for bound in (self.since, self.before):
            if not _is_release(bound):
                raise ValueError(f"patch {self.id}: {bound!r} is no release; give one like '0.12'")

    @property
    def reproduce(self) -> Callable[..., None]:
        """The module's function that runs on every rank, and raises if Megatron has the hazard.

        For a `Helper` it takes `helped`: whether to call the helper's function.
        """
        return sys.modules[self.module].reproduce  # type: ignore[no-any-return]

    @property
    def control(self) -> Callable[..., object] | None:
        """The module's control function: a correct program that resembles `reproduce`; None if
        there is none.

        It must give the same bits with and without patches. It is called on every rank, stock and
        patched. It raises if stock gets the program wrong, and returns the values to compare:
        bytes, numbers, strings, or lists of them. Each patch that can raise has one, and each
        helper. It may take `helped`, which is True when it is called with the patches.
        """
        return getattr(sys.modules[self.module], "control", None)

    def raises(self, text: str) -> bool:
        """Return True if an error's text matches `stock_error`, the hazard's pattern of the error
        that Megatron raises. Return False also if that pattern is only the name of an exception's
        type, which would match too many errors.
        """
        pattern = self.stock_error
        names_a_type_alone = re.fullmatch(r"\^?\w+:? ?\$?", pattern) is not None
        return bool(pattern) and not names_a_type_alone and re.search(pattern, text) is not None

    @property
    def versions(self) -> str:
        """The range of affected releases as a version specifier, such as `>=0.12,<0.17`."""
        return specifier(self.since, self.before)

    @property
    def answer(self) -> str:
        """A few words on what to do about the hazard; an error message shows them."""
        raise NotImplementedError

    @property
    def case_file(self) -> dict[str, str]:
        """The sections of the declaring module's docstring by name; the headline's name is ""."""
        module = sys.modules[self.module]
        doc = module.__doc__ or _docstring(module)
        parts = re.split(rf"^({'|'.join(SECTIONS)}):", doc, flags=re.MULTILINE)
        sections = {"": parts[0].strip()}
        for name, text in zip(parts[1::2], parts[2::2], strict=True):
            sections[name] = "\n".join(line.strip() for line in text.strip().splitlines())
        return sections

    @property
    def upstream(self) -> str:
        """The case file's public link to upstream's code, issue or pull request.

        Raises:
            ValueError: the case file has no link.
        """
        link = re.search(r"https://[^\s,;)]+", self.case_file.get("Upstream", ""))
        if link is None:
            raise ValueError(
                f"patch {self.id} links nothing upstream: give the section Upstream of its "
                "docstring a link that begins with https://"
            )
        return link[0].rstrip(".")


class Patch(Hazard, IndexEntry):
    """Describes a hazard that wrappers around Megatron's functions repair.

    Example:
        PATCH = Patch(
            "train() with --manual-gc leaves garbage collection off for good",
            target("training.train", train, "gc.disable()"),
        )
    """

    targets: tuple[Target, ...]
    """The functions to wrap, with their wrappers: all of them are wrapped, or none."""

    fixed_when: Callable[[Bodies], bool] | None = None
    """Takes the bodies by target address; returns True if upstream has repaired the hazard."""

    came_with: tuple[str, str] | None = None
    """The code that introduced the hazard: the address of a function, or a module and a colon, and
    a fragment of the function, which may be empty. A commit without it does not have the hazard;
    for releases `since` decides."""

    fixed_by: tuple[tuple[str, str], ...] = ()
    """Addresses of functions, each with a fragment of upstream's repair that stock lacks there."""

    default: bool = True
    """False for a patch that is costly, or was not run for lack of hardware: it is applied only if
    `only=` names it."""

    groups: tuple[str, ...] = ()
    """Keys of `GROUPS`: the promises that this patch keeps together with others."""

    provides: tuple[str, ...] = ()
    """Keys of `PROVIDED`: facts that library code may rely on if this patch is applied."""

    debug: bool = False
    """True if the patch only checks, so that `MEGATRON_IDEMPOTENT_CHECK=1` switches it on, too."""

    def __init__(self, summary: str | None = None, *targets: Target, **fields: Any) -> None:
        summary_field: dict[str, Any] = {} if summary is None else {"summary": summary}
        super().__init__(**{**summary_field, "targets": targets, **fields})

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.targets:
            raise ValueError(f"patch {self.id} has no target: give targets=(Target(…),)")
        reviewed_bodies = reviewed()
        for target in self.targets:
            address = target.address
            if not target.reviewed:
                bodies = reviewed_bodies.bodies.get(address, NOTHING)
                readers = {
                    name: reviewed_bodies.readers.get((address, name), ()) for name in bodies
                }
                own_bodies = {name: bodies[name] for name in bodies if self.id in readers[name]}
                target.__dict__["reviewed"] = own_bodies
            if target.relies_on and not target.parts:
                target.__dict__["parts"] = reviewed_bodies.parts.get((address, self.id), NOTHING)
        unknown = [name for name in self.groups if name not in GROUPS]
        if unknown:
            raise ValueError(f"patch {self.id} names groups {unknown}; allowed: {[*GROUPS]}")
        unknown = [name for name in self.provides if name not in PROVIDED]
        if unknown:
            raise ValueError(f"patch {self.id} provides {unknown}; allowed: {[*PROVIDED]}")
        if self.default and self.debug:
            raise ValueError(f"patch {self.id} has debug=True, so it has to have default=False")

    @property
    def answer(self) -> str:
        """The text "patch", or "patch, off by default", for the tables of hazards."""
        return "patch" if self.default else "patch, off by default"


class Helper(Hazard):
    """Describes a hazard that only the caller can avoid, by calling a function of this package."""

    call: str
    """Name of the function in `megatron_idempotent`, such as `ensure_params_synced`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("reproduce", "control"):
            if not takes_help(getattr(sys.modules[self.module], name, None)):
                raise ValueError(
                    f"helper {self.id} is not shown in use: define {name}(*, helped: bool)"
                )

    @property
    def answer(self) -> str:
        """The name of the function to call, in backticks, for the tables of hazards."""
        return f"`{self.call}`"


class Limit(Hazard):
    """Describes a hazard that this package cannot repair; its case file says what to avoid."""

    @property
    def answer(self) -> str:
        """The text "documented limit", for the tables of hazards."""
        return "documented limit"


def takes_help(program: Any) -> bool:
    """Return whether a program of a case file (`reproduce` or `control`) has the parameter
    `helped`, which says whether to call the function that avoids the hazard.
    """
    code = getattr(program, "__code__", None)
    # The names of local variables follow those of parameters.
    return (
        code is not None
        and "helped" in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    )


def _declaring_module() -> str:
    """Return the name of the module whose code is creating a record, such as a `Patch`."""
    frame = sys._getframe(1)
    while frame.f_globals["__name__"] in (__name__, Record.__module__):
        assert frame.f_back is not None
        frame = frame.f_back
    return str(frame.f_globals["__name__"])


#: Packages of frameworks, by the distribution that they are in.
_FRAMEWORKS = {
    "mcore_adapter": "mcore-adapter",
    "megatron.bridge": "megatron-bridge",
    "miles": "miles",
    "nemo_rl": "nemo-rl",
    "nvidia_resiliency_ext": "nvidia-resiliency-ext",
    "roll": "roll",
    "skyrl": "skyrl",
    "slime": "slime",
    "mcore_bridge": "mcore-bridge",
    "swift": "ms-swift",
    "verl": "verl",
}


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


FILE = "reviewed.txt"
_PART, _INDENT = "part", "  "


class Reviewed:
    """Holds the contents of `reviewed.txt`: which function bodies of upstream a person has
    reviewed, for which patches.

    Example:
        Reviewed(["m:f", "  0123456789ab 0.12.0 to 0.13.1"]).bodies["m:f"]
    """

    def __init__(self, lines: Iterable[str]) -> None:
        self.bodies: dict[str, dict[str, str]] = {}
        """Address of a function → hash of a body → the body's releases, oldest first."""
        self.readers: dict[tuple[str, str], list[str]] = {}
        """(Address, hash of a body) → the patches for which a person reviewed that body."""
        self.parts: dict[tuple[str, str], dict[str, str]] = {}
        """(Address, patch) → hash of a part → the part's releases."""
        address = name = ""
        for line in lines:
            if not line.startswith(" "):
                address = line.strip()
                continue
            if line.startswith(_INDENT * 2):
                self.readers.setdefault((address, name), []).extend(line.split())
                continue
            name, _, label = line.strip().partition(" ")
            if name == _PART:
                name, patch_id, label = label.split(" ", 2)
                self.parts.setdefault((address, patch_id), {})[name] = label
            else:
                self.bodies.setdefault(address, {})[name] = label

    def lines(self) -> list[str]:
        """Return the contents as lines of the file, functions in alphabetical order."""
        from textwrap import wrap

        file_lines = []
        for address in sorted({*self.bodies, *(address for address, _ in self.parts)}):
            file_lines.append(address)
            for name, label in self.bodies.get(address, {}).items():
                file_lines.append(f"{_INDENT}{name} {label}")
                patches = " ".join(sorted(self.readers.get((address, name), ())))
                file_lines += [
                    _INDENT * 2 + patches_line
                    for patches_line in wrap(patches, 96, break_on_hyphens=False)
                ]
            file_lines += [
                f"{_INDENT}{_PART} {name} {patch_id} {label}"
                for (part_address, patch_id), part_labels in sorted(self.parts.items())
                if part_address == address
                for name, label in part_labels.items()
            ]
        return file_lines


_known: list[Reviewed] = []


def reviewed() -> Reviewed:
    """Return the contents of this package's `reviewed.txt`, read once."""
    if not _known:
        _known.append(Reviewed(generated(FILE)))
    return _known[0]
