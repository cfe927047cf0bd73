"""Decides from source whether a patch is right for the Megatron on the path; imports nothing.

The order is fixed: switched off → not installed → version → target missing → fixed upstream →
body drifted. Version numbers count only on a release, which is known by its files; on any other
tree bodies alone decide. `api` and `install` find the outcomes that only live objects show (already
applied, conflict).
"""

from __future__ import annotations

from .base import MEGATRON, NOTHING, OLDEST, OPEN, Place, Record
from .catalog import load
from .import_hooks import find
from .releases import (
    FIXED,
    LANDS,
    UNKNOWN,
    UNKNOWN_STANDING,
    Installed,
    absence,
    from_index,
    installed,
    is_plain,
    numbers,
    package_of,
    release_named,
    release_on_path,
    supported,
)
from .rows import OFF_BY_DEFAULT
from .settings import SWITCH, Settings

TYPE_CHECKING = False  # importing typing would cost what the index saves
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .base import IndexEntry
    from .contract import BodyPart
    from .record import Hazard, Patch, Target
    from .releases import Sources
    from .rows import Status
    from .source import Body


class Verdict(Record):
    """Holds the result of one decision step about a patch. If `status` is None, the patch has
    passed the step; any other status refuses the patch, for the `reason`.
    """

    status: Status | None
    reason: str
    bodies: Mapping[str, Body] = NOTHING
    """The bodies by target address, if they were read."""
    homes: Mapping[str, str] = NOTHING
    """The addresses of moved functions, by target address."""
    release: str = ""
    """The release whose files these are, if nothing had to be read for that reason."""


GO = Verdict(status=None, reason="")


class Selection(Record):
    """Holds the arguments of one `apply()` call and the settings from environment variables, which
    together select the patches to apply.
    """

    only: frozenset[str] | None
    exclude: frozenset[str]
    settings: Settings
    strict: bool

    def named(self, patch_id: str) -> bool:
        """Return True if the argument `only=` of `apply()` names this patch, so that a failure of
        the patch is an error.
        """
        return self.only is not None and patch_id in self.only

    def gate(self, patch: IndexEntry) -> Verdict:
        """Check that neither arguments nor environment switch the patch off (step 1). Return `GO`,
        or a verdict with the status `disabled`.
        """
        settings, patch_id = self.settings, patch.id
        asked_for = self.named(patch_id) or patch_id in (settings.only or ())
        on = patch.default or asked_for or (patch.debug and settings.debug)
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


def version_of(hazard: Hazard | IndexEntry) -> Installed | None:
    """Return the installed version of the hazard's distribution; None if it is not installed.

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


def exact_release(distribution: str) -> Installed | None:
    """Return the installed version of a distribution if it is a published release. Return None for
    a development commit, or if the distribution is not installed.

    Megatron is a release if its files are (`releases`), and if it is older than all that we have
    read. A framework is one if it was installed from an index: installers note where else a package
    came from.
    """
    version = installed(distribution)
    if version is None:
        return None
    if distribution == MEGATRON:
        if is_older_than_all(version):
            return version
        release_there = release_on_path()
        return None if release_there is None else release_named(release_there.version)
    return version if is_plain(version) and from_index(distribution) else None


def is_older_than_all(version: Installed) -> bool:
    """Tell if a version of Megatron is older than `OLDEST`, the first release that is supported."""
    return not supported(version, OLDEST, OPEN)


def check_installed(hazard: Hazard | IndexEntry) -> Verdict:
    """Check that the hazard's distribution is installed (step 2). Return `GO`, or a verdict with
    the status `not_installed`.
    """
    if version_of(hazard) is None:
        return Verdict(status="not_installed", reason=absence(hazard.distribution))
    return GO


def check_range(hazard: Hazard | IndexEntry, release: Installed | None) -> Verdict:
    """Check that the release is in the hazard's range (step 3); a commit, given as None, is in
    every range. Return `GO`, or a verdict with the status `unsupported_version`.
    """
    if release is None or supported(release, hazard.since, hazard.before):
        return GO
    return Verdict(
        status="unsupported_version",
        reason=f"affects {hazard.distribution} {hazard.versions}, found {release.text}",
    )


def check_unread(patch: IndexEntry) -> Verdict:
    """Check what needs no source: that a file exists for each target's module, and that the version
    is in the patch's range (parts of steps 3 and 4). Return `GO`, or the verdict that refuses the
    patch.
    """
    missing = check_modules(patch)
    if missing.status is not None:
        return missing
    if patch.distribution != MEGATRON:
        return check_range(patch, exact_release(patch.distribution))
    claimed = installed(MEGATRON)
    assert claimed is not None  # check_installed() has found it
    return check_range(patch, claimed if is_older_than_all(claimed) else None)


def beside_range(patch: IndexEntry) -> str:
    """Return why Megatron's own version string is outside the hazard's range of releases. Return ""
    if it is inside, or if the hazard is one of a framework, not of Megatron.
    """
    return check_range(patch, installed(MEGATRON)).reason if patch.distribution == MEGATRON else ""


def check_modules(patch: IndexEntry) -> Verdict:
    """Check that each target's module has a file on the path, without reading it (half of step 4).
    Return `GO`, or a verdict with the status `missing_target`.
    """
    for target in patch.targets:
        if find(target.module) is None:
            return Verdict(
                status="missing_target",
                reason=f"{target.module} is not on the path beside {patch.distribution}",
            )
    return GO


def check_bodies(patch: IndexEntry, *, named: bool, sources: Sources | None = None) -> Verdict:
    """Return the verdict of decision steps 3 to 6 (version, target, fixed, drifted) on a patch, for
    the code on the path. If Megatron's files are exactly those of a known release, the verdict is
    looked up in a table; otherwise the bodies of the patch's target functions are read and judged.

    Args:
        patch: the patch; its case file is loaded only if bodies have to be read.
        named: True if the user has named it, and so accepts a drifted body.
        sources: what reads the modules on the path, each of them once for several patches.
    """
    missing = check_modules(patch)
    if missing.status is not None:
        return missing
    release = exact_release(patch.distribution)
    outside = check_range(patch, release)
    if outside.status is not None:
        return outside
    release_there = release_on_path() if patch.distribution == MEGATRON else None
    standing = UNKNOWN_STANDING if release_there is None else release_there.standings.get(patch.id)
    if release_there is not None and standing == LANDS:
        reason = f"its files are those of {release_there.version}"
        return Verdict(status=None, reason=reason, release=release_there.version)
    if standing == FIXED:
        return Verdict(status="fixed_upstream", reason=_FIXED)
    return _check_read(load(patch.id), release, sources, named=named)


def _check_read(
    patch: Patch, release: Installed | None, sources: Sources | None, *, named: bool
) -> Verdict:
    from .releases import OnPath
    from .source import read_body

    bodies: dict[str, Body | None] = {}
    for target in patch.targets:
        path = find(target.module)
        assert path is not None  # check_modules() has found it
        try:
            bodies[target.address] = read_body(path, target.qualname)
        except (SyntaxError, UnicodeDecodeError, OSError) as error:
            return Verdict(status="failed", reason=f"cannot read {target.module}: {error}")
    return judge(patch, bodies, sources or OnPath(), release, named=named)


def judge(
    patch: Patch,
    found_bodies: Mapping[str, Body | None],
    sources: Sources | None,
    release: Installed | None,
    *,
    named: bool,
) -> Verdict:
    """Return the verdict of decision steps 3 to 6 (version, target, fixed, drifted) on a patch,
    from the bodies of its target functions. A body is None if the sources lack the function.

    Args:
        patch: the patch.
        found_bodies: the bodies.
        sources: what the bodies are from, for all that wrappers read beside them; None to leave
            that out.
        release: the release that these sources are; None for a commit.
        named: True if the user has named the patch.
    """
    from .evidence import Bodies
    from .surroundings import unmet

    outside = check_range(patch, release)
    if outside.status is not None:
        return outside
    bodies, homes, moved = Bodies(sources=sources), dict[str, str](), list[str]()
    for target in patch.targets:
        body = found_bodies[target.address]
        if body is None:
            home = None if sources is None else _moved(target, sources)
            if home is None:
                reason = f"{target.module} defines no {target.qualname}"
                return Verdict(status="missing_target", reason=reason)
            new_place, body = home
            if new_place.address != target.address:
                homes[target.address] = new_place.address
                moved.append(f"{target.address} has moved to {new_place.address}")
        bodies[target.address] = body
    repaired, of_commit = _mended_by(patch, bodies, sources), False
    if release is None:
        labels = {t.qualname: t.label(bodies[t.address].hash) for t in patch.targets}
        of_commit = not all(numbers(label.partition(" ")[0]) for label in labels.values())
        if all(_older(label, patch.since) for label in labels.values()):
            bodies_text = ", ".join(
                f"{qualname} is that of {label}" for qualname, label in labels.items()
            )
            reason = f"{bodies_text}, and the hazard came with {patch.since}"
            return Verdict(status="unsupported_version", reason=reason)
        lacking_origin = None if repaired else _lacks_origin(patch, sources)
        if lacking_origin is not None:
            return Verdict(status="unsupported_version", reason=lacking_origin)
    if repaired or (patch.fixed_when is not None and patch.fixed_when(bodies)):
        return Verdict(status="fixed_upstream", reason=_FIXED)
    reviews = [review(target, bodies[target.address]) for target in patch.targets]
    lacking = None if sources is None else unmet(patch, release, sources, of_commit=of_commit)
    if lacking is not None:
        reviews.append((False, f"{lacking}: name the patch in only= to accept it"))
    drifted = not all(accepted for accepted, _ in reviews)
    # Of a patch that is refused, what speaks against it.
    reasons = [*moved, *(reason for accepted, reason in reviews if accepted != drifted)]
    reason = "; ".join(dict.fromkeys(reasons))
    if drifted and named:
        reason, drifted = f"{reason}; accepted by name", False
    return Verdict(status="drifted" if drifted else None, reason=reason, bodies=bodies, homes=homes)


_FIXED = "upstream's own code no longer has the hazard"


def _moved(target: Target, sources: Sources) -> tuple[Place, Body] | None:
    """Find where a target function is defined that its module only imports, or that its class
    inherits. Return its address (`module:qualname`) there and its body; None if it is not found.

    An inherited method counts only if the wrapper fits it, because in old releases classes
    inherited other functions. It is returned with the target's own address.
    """
    from .moved import definition

    place_and_body = definition(target.module, target.qualname, sources, inherited=False)
    if place_and_body is not None:
        return place_and_body
    place_and_body = definition(target.module, target.qualname, sources)
    if place_and_body is None or not review(target, place_and_body[1])[0]:
        return None
    return target, place_and_body[1]


def _mended_by(patch: Patch, bodies: Mapping[str, Body], sources: Sources | None) -> bool:
    """Tell if one of the functions that the patch's `fixed_by` names contains upstream's repair.

    `bodies` are the targets' bodies by address; without `sources`, other functions do not count.
    """
    from .moved import definition

    for address, fragment in patch.fixed_by:
        body = bodies.get(address)
        if body is None and sources is not None:
            function = Place(address=address)
            place_and_body = definition(function.module, function.qualname, sources)
            body = None if place_and_body is None else place_and_body[1]
        if body is not None and body.contains(fragment):
            return True
    return False


def _lacks_origin(patch: Patch, sources: Sources | None) -> str | None:
    """Return a text for the verdict's reason, which says that these sources lack the code that
    introduced the hazard (`came_with`). Return None if they have that code, or if the patch names
    none.
    """
    from .evidence import Bodies
    from .moved import definition

    if patch.came_with is None or sources is None:
        return None
    address, fragment = patch.came_with
    origin = Place(address=address)
    if not origin.qualname:
        is_there = sources.text(origin.module) is not None
        return None if is_there else f"the hazard came with {origin.module}, which is not there"
    place_and_body = definition(origin.module, origin.qualname, sources)
    if place_and_body is None:
        return f"the hazard came with {address}, which is not there"
    if fragment and Bodies({address: place_and_body[1]}, sources).lack(fragment):
        return f"the hazard came with `{fragment}` in {address}, which lacks it"
    return None


def _older(label: str, since: str) -> bool:
    """Tell if all releases in a label, such as `0.12.0 to 0.15.3`, are older than `since`."""
    last = numbers(label.rpartition(" ")[2])
    return () < last < numbers(since)


def review(target: Target, body: Body) -> tuple[bool, str]:
    """Return whether the target's wrapper fits this body of the function, and the reason as text.
    It fits if a person reviewed the body, or if the body has all that the patch relies on.
    """
    if body.hash in target.reviewed:
        return True, f"body reviewed on {target.reviewed[body.hash]}"
    if not target.relies_on:
        return False, (
            f"{target.qualname} has body {body.hash}, reviewed are "
            f"{', '.join(target.reviewed) or 'none'}: name the patch in only= to accept it"
        )
    reason = _drifted(target, body)
    if reason is not None:
        accept = "name the patch in only= to accept it"
        return False, f"{target.qualname} (body {body.hash}) {reason}: {accept}"
    return True, f"body {body.hash} not reviewed, but holds what the patch relies on"


def _drifted(target: Target, body: Body) -> str | None:
    """Check a body that nobody has reviewed. If the target's wrapper does not fit it, return why,
    as text that continues a sentence about the function; None if it fits.
    """
    from .contract import unmet

    missing = [fragment for fragment in target.relies_on if not body.contains(fragment)]
    if missing:
        return f"no longer contains `{missing[0]}`, which the patch relies on"
    reason = unmet(target.wrapper, body)
    if reason is not None or not target.parts:
        return reason
    part = part_of(target, body)
    if part.hash in target.parts:
        return None
    return f"does something new with what the patch relies on (part {part.hash})"


def part_of(target: Target, body: Body) -> BodyPart:
    """Return a `BodyPart`: the body's statements that use names in the target's `relies_on`, and
    the declarations of the parameters that the target's wrapper takes.

    Raises:
        OSError, TypeError, ValueError: the wrapper cannot be read.
    """
    from .contract import BodyPart, contract_of

    contract = contract_of(target.wrapper)
    return BodyPart(body, target.relies_on, (*contract.reads, *contract.leading))
