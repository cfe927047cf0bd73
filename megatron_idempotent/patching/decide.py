"""Decides from source whether a patch is right for the Megatron on the path; imports nothing.

The order is fixed: switched off → not installed → version → target missing → fixed upstream →
body drifted. The version range only selects; the body decides. `api` and `install` find the
outcomes that only live objects show (already applied, conflict).

Importing `packaging` takes longer than all else that `apply()` does, so Megatron's constants are
compared as numbers, and it is imported only for other distributions.
"""

from __future__ import annotations

import os

from .base import NOTHING, Record
from .catalog import MEGATRON, OPEN, UNTRIED, Place, untried
from .import_hooks import find
from .settings import SWITCH, Settings

TYPE_CHECKING = False  # importing typing would cost what the index saves
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from .catalog import Outline
    from .contract import BodyPart
    from .record import Hazard, Patch, Target
    from .report import Status
    from .source import Body
    from .surroundings import Sources


class Verdict(Record):
    """Says that a patch may go on (`status` None), or the outcome that ends it here, and why."""

    status: Status | None
    reason: str
    bodies: Mapping[str, Body] = NOTHING
    """The bodies by target address, if they were read."""


OFF_BY_DEFAULT = "off by default: name it in only= to apply it"
GO = Verdict(status=None, reason="")


class Selection(Record):
    """Holds the arguments of one `apply()` together with the environment."""

    only: frozenset[str] | None
    exclude: frozenset[str]
    settings: Settings
    strict: bool

    def named(self, patch_id: str) -> bool:
        """Return whether the caller named this patch, and so wants to know if it fails."""
        return self.only is not None and patch_id in self.only

    def gate(self, patch: Outline) -> Verdict:
        """Decide step 1: whether arguments and environment leave the patch on."""
        settings, patch_id = self.settings, patch.id
        asked = self.named(patch_id) or patch_id in (settings.only or ())
        on = patch.default or asked or (patch.debug and settings.debug)
        for off, reason in (
            (not settings.enabled, f"{SWITCH}=0"),
            (patch_id in settings.disable, f"named in {SWITCH}_DISABLE"),
            (settings.only is not None and patch_id not in settings.only, f"not in {SWITCH}_ONLY"),
            (patch_id in self.exclude, "named in exclude="),
            (self.only is not None and patch_id not in self.only, "not in only="),
            (not on, OFF_BY_DEFAULT),
        ):
            if off:
                return Verdict(status="disabled", reason=reason)
        return GO


def version_of(hazard: Hazard | Outline) -> Installed | None:
    """Return the installed version of the hazard's distribution.

    If a framework is not on the path, that is found without reading metadata, which would take
    longer than all else that `apply()` does. A framework on the path without metadata has the
    version `UNKNOWN`.
    """
    targets: Sequence[Place] = getattr(hazard, "targets", ())
    if hazard.distribution == MEGATRON or not targets:
        return installed(hazard.distribution)
    if not any(find(package_of(target.module)) for target in targets):
        return None
    return installed(hazard.distribution) or UNKNOWN


def package_of(module: str) -> str:
    """Return the package of a distribution that holds the module, such as `slime`."""
    # megatron itself is a namespace that several distributions share.
    parts = module.split(".")
    return ".".join(parts[: 2 if parts[0] == "megatron" else 1])


def check_version(hazard: Hazard | Outline, version: Installed | None) -> Verdict:
    """Decide step 2: whether the distribution is installed, and in the hazard's range."""
    if version is None:
        return Verdict(status="not_installed", reason=absence(hazard.distribution))
    if not in_range(hazard, version):
        return Verdict(
            status="unsupported_version",
            reason=f"affects {hazard.distribution} {hazard.versions}, found {version.text}",
        )
    return GO


def in_range(hazard: Hazard | Outline, version: Installed) -> bool:
    """Tell if the hazard's range has the version, or nobody has run it yet: then bodies decide."""
    if version is UNKNOWN:
        return True
    return supported(version, hazard.since, hazard.before)


def beyond(patch: Outline | Patch) -> str:
    """Return a prefix for a reason, which says that nobody has run this version; else nothing."""
    version = version_of(patch)
    if version is None or patch.before != UNTRIED:
        return ""
    if not supported(version, untried(), OPEN):
        return ""
    return f"{version.text} is above what was run; "


def check_modules(patch: Outline | Patch) -> Verdict:
    """Check that a file exists for every module: the cheap half of step 3. Reads no source."""
    for target in patch.targets:
        if find(target.module) is None:
            return Verdict(
                status="missing_target",
                reason=f"{target.module} is not on the path beside {patch.distribution}",
            )
    return GO


def check_bodies(patch: Patch, *, named: bool, sources: Sources | None = None) -> Verdict:
    """Decide steps 3 to 5: read every target's body, and compare it with those that were reviewed.

    Args:
        patch: the patch.
        named: True if the user has named it, and so accepts a drifted body.
        sources: what reads the modules on the path, each of them once for several patches.
    """
    from .source import read_body
    from .surroundings import OnPath

    bodies: dict[str, Body | None] = {}
    for target in patch.targets:
        path = find(target.module)
        if path is None:
            return check_modules(patch)
        try:
            bodies[target.address] = read_body(path, target.qualname)
        except (SyntaxError, UnicodeDecodeError, OSError) as error:
            return Verdict(status="failed", reason=f"cannot read {target.module}: {error}")
    verdict = judge(patch, bodies, sources or OnPath(), version_of(patch), named=named)
    return Verdict(
        status=verdict.status, reason=beyond(patch) + verdict.reason, bodies=verdict.bodies
    )


def judge(
    patch: Patch,
    found: Mapping[str, Body | None],
    sources: Sources | None,
    version: Installed | None,
    *,
    named: bool,
) -> Verdict:
    """Decide steps 3 to 5 on bodies that were read, by target address; None for a missing one.

    Args:
        patch: the patch.
        found: the bodies.
        sources: what the bodies are from, for all that wrappers read beside them; None to leave
            that out.
        version: the version of the patch's distribution in these sources.
        named: True if the user has named the patch.
    """
    from .surroundings import unmet

    bodies: dict[str, Body] = {}
    for target in patch.targets:
        body = found[target.address]
        if body is None:
            reason = f"{target.module} defines no {target.qualname}"
            return Verdict(status="missing_target", reason=reason)
        bodies[target.address] = body
    for target in patch.targets:
        label = target.label(bodies[target.address].hash)
        if _older(label, patch.since):
            reason = f"{target.qualname} is that of {label}, and the hazard came with {patch.since}"
            return Verdict(status="unsupported_version", reason=reason, bodies=bodies)
    mended = patch.fixed_when is not None and patch.fixed_when(bodies)
    if mended or (sources is not None and _mended_beside(patch, sources)):
        reason = "upstream's own code no longer has the hazard"
        return Verdict(status="fixed_upstream", reason=reason, bodies=bodies)
    reviews = [review(target, bodies[target.address]) for target in patch.targets]
    why = None if sources is None else unmet(patch, version, sources)
    if why is not None:
        reviews.append((False, f"{why}: name the patch in only= to accept it"))
    drifted = not all(known for known, _ in reviews)
    # Of a patch that is refused, what speaks against it.
    reasons = [reason for known, reason in reviews if known != drifted]
    reason = "; ".join(dict.fromkeys(reasons))
    if drifted and named:
        return Verdict(status=None, reason=f"{reason}; accepted by name", bodies=bodies)
    return Verdict(status="drifted" if drifted else None, reason=reason, bodies=bodies)


def _mended_beside(patch: Patch, sources: Sources) -> bool:
    """Tell if another function than the targets repairs the hazard in these sources."""
    from .source import parse_body

    if patch.fixed_by is None:
        return False
    address, fragment = patch.fixed_by
    place = Place(address=address)
    text = sources.text(place.module)
    body = None if text is None else parse_body(text, place.qualname)
    return body is not None and body.contains(fragment)


def _older(label: str, since: str) -> bool:
    """Tell if the releases in a body's label, such as `0.12.0 to 0.15.3`, are all before `since`.

    A development commit has the version of the release that it leads to, and may have the code of
    the one before.
    """
    last = numbers(label.rpartition(" ")[2])
    return () < last < numbers(since)


def review(target: Target, body: Body) -> tuple[bool, str]:
    """Return whether the target's wrapper is right for this body, and why."""
    if body.hash in target.reviewed:
        return True, f"body reviewed on {target.reviewed[body.hash]}"
    if not target.relies_on:
        return False, (
            f"{target.qualname} has body {body.hash}, reviewed are "
            f"{', '.join(target.reviewed) or 'none'}: name the patch in only= to accept it"
        )
    why = _drifted(target, body)
    if why is not None:
        accept = "name the patch in only= to accept it"
        return False, f"{target.qualname} (body {body.hash}) {why}: {accept}"
    return True, f"body {body.hash} not reviewed, but holds what the patch relies on"


def _drifted(target: Target, body: Body) -> str | None:
    """Say why the wrapper does not fit a body that nobody reviewed; None if it fits."""
    from .contract import unmet

    missing = [fragment for fragment in target.relies_on if not body.contains(fragment)]
    if missing:
        return f"no longer contains `{missing[0]}`, which the patch relies on"
    why = unmet(target.wrapper, body)
    if why is not None or not target.parts:
        return why
    part = part_of(target, body)
    if part.hash in target.parts:
        return None
    return f"does something new with what the patch relies on (part {part.hash})"


def part_of(target: Target, body: Body) -> BodyPart:
    """Return the part of the body that touches what the target relies on.

    Raises:
        OSError, TypeError, ValueError: the wrapper cannot be read.
    """
    from .contract import BodyPart, contract_of

    contract = contract_of(target.wrapper)
    return BodyPart(body, target.relies_on, (*contract.reads, *contract.leading))


# megatron-core says its version in a file of its own, which is right for a checkout on PYTHONPATH
# too. The `+<git sha>` that newer files append belongs to whatever repository encloses them, so
# only the four constants are read.
_PACKAGE_INFO = {"megatron-core": "megatron.core.package_info"}


class Installed(Record):
    """Holds a distribution's version."""

    text: str
    """The version as the distribution writes it, such as `0.17.0rc0`."""
    release: tuple[int, ...]
    """The release that the version belongs to or leads to, such as (0, 17, 0)."""


def installed(distribution: str) -> Installed | None:
    """Return the version of what `import` would find; None if there is none, or it has none."""
    info = _PACKAGE_INFO.get(distribution)
    if info is None:
        return _from_metadata(distribution)
    path = find(info)
    if path is None:
        return None
    try:
        state = path, os.stat(path).st_mtime_ns
        if state not in _read:
            with open(path, encoding="utf-8") as file:
                _read[state] = from_package_info(file)
        return _read[state]
    except (OSError, UnicodeDecodeError):
        return None


UNKNOWN = Installed(text="unknown", release=())
"""The version of a package on the path without metadata, such as a checkout."""


def absence(distribution: str) -> str:
    """Say why `installed` returns None, as a clause."""
    info = _PACKAGE_INFO.get(distribution)
    path = None if info is None else find(info)
    if path is None:
        return f"{distribution} is not installed"
    return f"no version of {distribution} can be read from {path}"


def supported(version: Installed, since: str, before: str) -> bool:
    """Return whether `since` <= release < `before`, both written like `0.12`.

    Pre-releases count as the release they lead to: `0.17.0rc0` holds 0.17's code, and under plain
    specifier rules it would be in neither `<0.17` nor `>=0.17`.
    """
    return numbers(since) <= _significant(version.release) < numbers(before)


def numbers(text: str) -> tuple[int, ...]:
    """Return a release like `0.12` as numbers to compare; none for any other text."""
    parts = text.split(".")
    return _significant(tuple(map(int, parts))) if all(map(str.isdecimal, parts)) else ()


def place(name: str) -> tuple[bool, tuple[int, ...], str]:
    """Return a key that sorts releases by number, and commits after them by name.

    Example: `sorted(["main", "0.9", "0.12.3"], key=place) == ["0.9", "0.12.3", "main"]`.
    """
    return not numbers(name), numbers(name), name


def _significant(release: tuple[int, ...]) -> tuple[int, ...]:
    while release and release[-1] == 0:  # 0.12 and 0.12.0 are one release
        release = release[:-1]
    return release


# The version that a file says, with the time at which it did.
_read: dict[tuple[str, int], Installed | None] = {}


def from_package_info(lines: Iterable[str]) -> Installed | None:
    """Return the version that the lines of a `package_info.py` say, or None."""
    # Line by line, because these are plain assignments and `ast` takes longer to import than the
    # rest of this file to run.
    constants: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition("=")
        constants[name.rstrip()] = value.partition("#")[0].strip()
    release = [constants.get(part, "") for part in ("MAJOR", "MINOR", "PATCH")]
    if not all(number.isdecimal() for number in release):
        return None
    text = ".".join(release) + constants.get("PRE_RELEASE", "").strip("'\"")
    return Installed(text=text, release=tuple(map(int, release)))


def from_metadata_text(text: str, distribution: str) -> Installed | None:
    """Return the version that a wheel's METADATA says; None for another distribution's."""
    from email import message_from_string

    from packaging.utils import canonicalize_name

    said = message_from_string(text)
    if canonicalize_name(said["Name"] or "") != canonicalize_name(distribution):
        return None
    return _parsed(said["Version"] or "")


def _from_metadata(distribution: str) -> Installed | None:
    from importlib import metadata

    try:
        return _parsed(metadata.version(distribution))
    except metadata.PackageNotFoundError:
        return None


def _parsed(text: str) -> Installed | None:
    from packaging.version import InvalidVersion, Version

    try:
        version = Version(text)
    except InvalidVersion:
        return None
    return Installed(text=str(version), release=version.release)
