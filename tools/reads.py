"""Derives the names that upstream has to bind for the wrappers of patches, for `reads.txt`.

`wrapper_reads` collects the names that wrappers read, call or set. The source trees on which a
patch lands decide which of them upstream has to bind, and from which release on. A name that no
tree has belongs to this package, Python or torch. A name that all trees have is needed, even if the
wrapper checks for it. A name that a release added or removed is needed since, or until, that
release.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache

import _checkout  # noqa: F401  # before what it finds
from wrapper_reads import Read, reads_of

from megatron_idempotent.cli.needs import (
    bound_of,
    by_version,
    fits,
    merged,
    needs_of_names,
    versions_with,
)
from megatron_idempotent.patching.base import MEGATRON
from megatron_idempotent.patching.catalog import patches
from megatron_idempotent.patching.moved import bases_of
from megatron_idempotent.patching.record import Patch
from megatron_idempotent.patching.surroundings import (
    Need,
    Needs,
    binds,
    class_text,
    key_of,
    parameters,
    returned,
)
from megatron_idempotent.patching.trees import SourceTree

_UPSTREAM = ("megatron.core.", "megatron.training.")
#: If more modules than `_MANY` define a name, only `_FEW` of them are listed.
_MANY, _FEW = 6, 3


def derived(patch: Patch) -> tuple[frozenset[tuple[Read, str]], bool]:
    """Return the names of upstream that a patch's wrappers read, call or set.
    Also return whether the wrappers store attributes on upstream's objects.

    Returns:
        (Read, `module:Class` of which it is an attribute, or "" if unknown) pairs; and True if the
        wrappers set attributes of our own on upstream's objects.
    """
    pairs: set[tuple[Read, str]] = set()
    keeps = False
    for target in patch.targets:
        owner = target.qualname.rpartition(".")[0]
        reads, keeps_state = reads_of(target.wrapper, of_class=bool(owner))
        keeps |= keeps_state
        pairs |= {
            (read, f"{target.module}:{owner}" if read.of_self and owner else "") for read in reads
        }
    return frozenset(pairs), keeps


def renewed(
    present: Mapping[str, Needs], trees: Iterable[SourceTree], ids: Collection[str] | None = None
) -> dict[str, Needs]:
    """Return the new contents of `reads.txt`: patch → the names that its wrappers need of upstream.
    The old contents are updated by the wrappers' present code and by source trees.

    Args:
        present: the present contents. Names that wrappers no longer use are removed; entries about
            releases that are not among the trees are kept.
        trees: sources of Megatron, in which new names are looked up.
        ids: the patches to update, whose bodies in these trees a person has reviewed; None for all
            patches, each in the trees on which it lands.
    """
    megatrons = by_version(trees)
    needs = {name: old for name, old in present.items() if ids is not None and name in patches()}
    for patch in patches().values():
        if patch.distribution == MEGATRON and (ids is None or patch.id in ids):
            fitting = [tree for tree in megatrons if fits(patch, tree, read=ids is not None)]
            old = present.get(patch.id)
            needs[patch.id] = needs_of(patch, fitting, old, accepts=ids is not None)
    return needs


def needs_of(
    patch: Patch, trees: Sequence[SourceTree], old: Needs | None, *, accepts: bool = False
) -> Needs:
    """Return the names that a patch's wrappers need from upstream, as a `Needs`.

    Args:
        patch: the patch.
        trees: the trees on which the patch lands, the oldest first.
        old: the patch's present needs, or None if it is new.
        accepts: True if a person has reviewed these trees for the patch, so that their
            definitions of the names are accepted.
    """
    reads, keeps = derived(patch)
    old_needs: dict[tuple[str, str], list[Need]] = {}
    for need in old.names if old is not None else ():
        bare = need.name.lstrip(".") or need.modules[0].rpartition(".")[2]
        old_needs.setdefault((bare, _kind(need.use)), []).append(need)
    # First, because old needs may have names that `elsewhere` did not have at the time.
    reads = frozenset(
        (read, owner)
        for read, owner in reads
        if read.module or owner or read.name not in elsewhere()
    )
    needs: set[Need | None] = set()
    for name, use in sorted({(read.name, read.use) for read, _ in reads}):
        if (name, _kind(use)) in old_needs:
            for need in old_needs[name, _kind(use)]:
                needs |= merged(need, trees) if accepts or not need.use else {need}
            continue
        for read, owner in sorted(reads, key=str):
            if (read.name, read.use) == (name, use):
                only_new = old is not None and read.guarded
                needs |= set(_needs(read, owner, patch, trees, only_new))
    return needs_of_names(filter(None, needs), keeps=keeps)


def _kind(use: str) -> str:
    """Return how a wrapper uses a name, in a form in which two uses can be compared.
    A use in `reads.txt` may have hashes in brackets, which the wrapper's code cannot tell: return
    "[]" for it, and any other use unchanged.
    """
    return "[]" if use.startswith("[") else use


def _needs(
    read: Read, of_class: str, patch: Patch, trees: Sequence[SourceTree], only_new: bool
) -> Iterator[Need | None]:
    """Yield a `Need` for each place in upstream that binds a name which wrappers newly use.
    It has the range of releases that have the name. Yield None, or nothing, for a place without
    such a range.
    """
    if not read.use:
        for binding in _bindings_of(read, of_class, patch, trees):
            yield _bounded(binding, trees, only_new)
        return
    for module, owner in _definitions(read, of_class, patch, trees):
        use = read.use
        if use == "[]":
            results = (returned(tree.text(module) or "", owner, read.name) for tree in trees)
            hashes = sorted(set(filter(None, results)))
            if not hashes:
                continue
            use = f"[{'|'.join(hashes)}]"
        need = Need(modules=(module,), owner=owner, name=read.name, use=use)
        # The patch fits all these trees: if a definition in one does not allow the use, the wrapper
        # does not use it there.
        answers = {need.is_allowed(tree) for tree in trees}
        if False not in answers:
            yield need if True in answers else None
        elif True in answers:
            allowing = [key_of(t.versions[MEGATRON]) for t in trees if need.is_allowed(t)]
            lacking = [key_of(t.versions[MEGATRON]) for t in trees if need.is_allowed(t) is False]
            later = [key for key in allowing if key > max(lacking)]
            if later:
                yield Need(**{**vars(need), "since": bound_of(min(later))})


def _definitions(
    read: Read, of_class: str, patch: Patch, trees: Sequence[SourceTree]
) -> list[tuple[str, str]]:
    """Return the (module, class) pairs of upstream that define `read.name`, an attribute that one
    of the patch's wrappers sets or calls.

    The wrapped classes and their bases are searched first, then all classes in their modules, then
    all others. If many define the name, it is not clear which is meant, and none is returned.
    """
    if read.module:
        modules, owner, _ = _imported(read, trees)
        return [(modules[0], owner)]
    module, _, wrapped = of_class.partition(":")
    owners = {(t.module, t.qualname.rpartition(".")[0]) for t in patch.targets}
    owners = {(module, wrapped)} if of_class else {owner for owner in owners if owner[1]}
    near = sorted(owners | {base for owner in owners for base in _bases(*owner, trees)})
    homes = sorted({t.module for t in patch.targets})
    everywhere = {m: None for tree in trees for m in tree.modules if m.startswith(_UPSTREAM)}
    same_module = ((m, c) for m in homes for c in _classes_anywhere(m, read.name, trees))
    anywhere = ((m, c) for m in everywhere for c in _classes_anywhere(m, read.name, trees))
    for candidates in (near, same_module, anywhere):
        defining = [
            (m, c) for m, c in candidates if any(_defines(t.text(m), c, read) for t in trees)
        ]
        if defining:
            # The limit is lower for a guarded read, such as a name in a table.
            return defining if len(defining) <= (_FEW if read.guarded else 2 * _MANY) else []
    return []


def _classes_anywhere(module: str, name: str, trees: Sequence[SourceTree]) -> list[str]:
    texts = {text for tree in trees if name in (text := tree.text(module) or "")}
    return list(dict.fromkeys(c for text in texts for c in _classes_that_bind(text, name)))


def _defines(text: str | None, owner: str, read: Read) -> bool:
    if not text or not binds(text, owner, read.name):
        return False
    return read.use == "!" or parameters(text, owner, read.name) is not None


def _bindings_of(
    read: Read, of_class: str, patch: Patch, trees: Sequence[SourceTree]
) -> list[_Binding]:
    """Return the (modules, class, name) places where upstream binds a name that a wrapper reads."""
    if read.module:
        return [_imported(read, trees)]
    module, _, owner = of_class.partition(":")
    if of_class:
        bindings: list[_Binding] = [
            ((base_module,), base, read.name)
            for base_module, base in ((module, owner), *_bases(module, owner, trees))
            if any(_binds(((base_module,), base, read.name), tree) for tree in trees)
        ]
        if bindings:
            return bindings
    if read.name in elsewhere():
        return []
    owners = {(t.module, t.qualname.rpartition(".")[0]) for t in patch.targets}
    owners |= {base for wrapped in owners for base in _bases(*wrapped, trees)}
    return _bindings(read.name, sorted({t.module for t in patch.targets}), owners, trees)


def _bases(module: str, owner: str, trees: Sequence[SourceTree]) -> list[tuple[str, str]]:
    """Return (module, name) of a class's direct and indirect base classes that are defined in the
    folder of the class's module, in the newest tree.
    """
    bases: dict[tuple[str, str], None] = {}
    for tree in trees[-1:] if owner else ():
        for name in bases_of(tree.text(module) or "", owner):
            base = name.rpartition(".")[2]
            for home in tree.beside(module):
                if class_text(tree.text(home) or "", base) and (home, base) not in bases:
                    bases |= dict.fromkeys([(home, base), *_bases(home, base, trees)])
    return list(bases)


_Binding = tuple[tuple[str, ...], str, str]
"""The modules and the class that bind a name, and the name, as in `Need`."""


def _binds(binding: _Binding, tree: SourceTree) -> bool:
    modules, owner, name = binding
    return Need(modules=modules, owner=owner, name=name).is_met(tree)


def _imported(read: Read, trees: Sequence[SourceTree]) -> _Binding:
    """Return the (modules, class, name) place that binds a name which a wrapper imports.
    The name may itself be a module: class and name are then empty. `read.module` may name a class.
    """
    if any(tree.text(f"{read.module}.{read.name}") is not None for tree in trees):
        return (f"{read.module}.{read.name}",), "", ""
    if any(tree.text(read.module) is not None for tree in trees):
        return (read.module,), "", read.name
    module, _, owner = read.module.rpartition(".")
    return (module,), owner, read.name


def _bindings(
    name: str, near: Sequence[str], owners: Iterable[tuple[str, str]], trees: Sequence[SourceTree]
) -> list[_Binding]:
    """Return the (modules, class, name) places where upstream binds an attribute called `name`.
    A wrapper reads the attribute from an object of unknown class.

    The wrapped classes are searched first, then their modules (`near`), then all others, for
    definitions and then for code that sets the attribute on another object. If `near` has only such
    code, classes that define the attribute in all trees are returned, too.
    """
    bindings: list[_Binding] = [
        ((module,), owner, name)
        for module, owner in sorted(owners)
        if owner and any(_binds(((module,), owner, name), tree) for tree in trees)
    ]
    defined = bindings or _in_modules(name, near, trees)
    if defined:
        return defined
    everywhere = _in_modules(name, (), trees)
    setting = _in_modules(f".{name}", near, trees)
    if not setting:
        return everywhere
    always = [binding for binding in everywhere if all(_binds(binding, tree) for tree in trees)]
    return [*setting, *(binding for binding in always if binding[1])]


def _in_modules(name: str, near: Sequence[str], trees: Sequence[SourceTree]) -> list[_Binding]:
    """Return a name's bindings in the modules `near`; if `near` is empty, in all of upstream's.
    They are those of the newest tree that has any.

    If there are many, a few that are in all trees are returned.
    """
    for tree in reversed(trees):
        modules = near or [m for m in tree.modules if m.startswith(_UPSTREAM)]
        binding = [m for m in modules if binds(tree.text(m) or "", "", name)]
        if len(binding) > _MANY:
            # Modules of configs come first.
            always = [m for m in binding if all(_binds(((m,), "", name), t) for t in trees)]
            always.sort(key=lambda module: not module.endswith("_config"))
            return [(tuple(sorted(always[:_FEW])), "", name)] if always else []
        classes = [(m, c) for m in binding for c in _classes_that_bind(tree.text(m) or "", name)]
        if len(binding) == len(classes) == 1:
            return [((binding[0],), classes[0][1], name)]
        if binding:
            return [(tuple(binding), "", name)]
    return []


def _classes_that_bind(text: str, name: str) -> list[str]:
    names = dict.fromkeys(re.findall(r"^class (\w+)", text, re.MULTILINE))
    return [owner for owner in names if binds(text, owner, name)]


def _bounded(binding: _Binding, trees: Sequence[SourceTree], only_new: bool) -> Need | None:
    """Return the `Need` for a bound name, with the range of releases that have the name.
    Return None if no tree has the name, or those that have it form no range.

    Args:
        binding: the binding of the name.
        trees: the trees on which the patch lands.
        only_new: True if releases before these trees need not have the name.
    """
    modules, owner, name = binding
    has, lacks = versions_with(Need(modules=modules, owner=owner, name=name), trees)
    if not has:
        return None
    since = end = ""
    if lacks:
        later = {key for key in has if key > max(lacks)}
        if later:
            since = bound_of(min(later))
        elif min(has) < min(lacks):
            end = bound_of(min(lacks))
        else:
            return None
    elif only_new:
        since = bound_of(min(has))
    return Need(modules=modules, owner=owner, name=name, since=since, before=end)


@lru_cache(maxsize=1)
def elsewhere() -> frozenset[str]:
    """Return the attribute names of Python's and torch's own objects.
    They are not looked up in upstream.
    """
    import enum
    import functools
    import hashlib
    import logging
    import threading
    import types

    import torch
    from torch.distributed.checkpoint import filesystem

    kinds: tuple[type, ...] = (
        *(dict, list, set, str, bytes, int, type, types.FunctionType, types.FrameType),
        *(types.CodeType, types.TracebackType, types.ModuleType, types.MethodType),
        *(torch.Tensor, torch.nn.Module, torch.optim.Optimizer, torch.cuda.Stream),
        *(torch.utils.hooks.RemovableHandle, torch.distributed.Work, torch.autograd.Function),
        *(functools.partial, enum.Enum, logging.Logger, type(hashlib.sha256()), threading.Thread),
    )
    stored = filesystem._StorageInfo.__dataclass_fields__
    instances = {"parameters", "param_groups", "path", *stored}
    return frozenset(name for kind in kinds for name in dir(kind)) | instances
