"""Puts our wrappers around live functions, and rebinds names that still hold the old functions.

One `PatchPoint` per patched function. The object installed there is one plain function that never
changes: `deepcopy`, `pickle`, `cloudpickle` and Dynamo treat it as they treat upstream's, and twice
applied is once applied by identity, with a `revert()` in between too. The patches on it are layers
below that function, so that they can be added and taken away in any order.

`StaleReferences` finds names that still hold the old function. Most are the function's own name;
reference counts say where there are more. Only then it looks at all values: a process has some
300,000 in its modules, so one look serves all functions of an `apply()`, and it writes a reference
count of each, for which a forked process copies the page.
"""

from __future__ import annotations

import functools
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from .base import Conflict
from .import_hooks import namespace
from .neighbours import layers, who
from .record import Target
from .releases import package_of

if TYPE_CHECKING:
    from .source import Body


_Modules = Iterable[tuple[str, types.ModuleType]]
#: Packages that do not import Megatron. Half of all names in a process are in their modules.
_NEVER = frozenset({"torch"}) | sys.stdlib_module_names


class StaleReferences:
    """Collects patch points, i.e. replaced functions, to which modules' names may still refer.
    `rebind` then updates the names in all modules, in one pass.
    """

    def __init__(self) -> None:
        self._sites: list[PatchPoint] = []

    def follow(self, site: PatchPoint) -> None:
        """Add a patch point, for the next `rebind()`."""
        self._sites.append(site)

    def rebind(self) -> None:
        """Find the names in modules that still refer to the function which a collected patch point
        has taken out of use, and bind them to its `current` function. Then no patch point is
        collected any more.

        Afterwards each patch point's `left` lists such names in modules that it may not change.

        Call it after all assignments to the sites: a module that another thread imports in between
        gets our functions by itself, or is seen here.
        """
        sites, self._sites = self._sites, []
        if not sites:
            return
        for site in sites:
            site.left = []
        prefixes = tuple({prefix for site in sites for prefix in site.prefixes})
        owners = {site.target.module for site in sites}
        near_modules = list(modules(lambda name: name in owners or name.startswith(prefixes)))
        counts = dict.fromkeys(sites, 0)
        for site, binding in _held(sites, near_modules, names={site.name for site in sites}):
            site.lead(*binding)
            counts[site] += 1
        # Another thread may have bound a function since its references were counted.
        alone = threading.active_count() == 1
        hidden = [site for site in sites if site.is_held_by_more_than(counts[site]) or not alone]
        for site, binding in _held(hidden, near_modules):
            site.lead(*binding)
        near_names = {name for name, _ in near_modules}
        installed = [site for site in hidden if site.is_installed]
        for site, binding in _held(installed, modules(lambda name: name not in near_names)):
            site.lead(*binding)


def modules(
    is_sought: Callable[[str], bool] = lambda name: True, *, everywhere: bool = False
) -> Iterator[tuple[str, types.ModuleType]]:
    """Yield (name, module) for imported modules that may refer to Megatron's functions.

    Lazy modules are not loaded by this.

    Args:
        is_sought: returns whether to yield the module with a name.
        everywhere: True to yield the modules of torch and of Python's standard library too,
            which do not import Megatron.
    """
    for name in list(sys.modules):
        # The name is checked first: reading a module object copies its memory page in a fork.
        may_import = everywhere or name.partition(".")[0] not in _NEVER
        module = sys.modules.get(name) if may_import and is_sought(name) else None
        # Not isinstance(): it trusts a proxy's `__class__`, and reading that loads a lazy module.
        if module is not None and issubclass(type(module), types.ModuleType):
            yield name, module


def references(holder: dict[str, Any], name: str) -> int:
    """Count the references to the object `holder[name]` in this process, other than that of the
    dictionary `holder` itself.
    """
    return _references(holder, name) - _ALONE


def _references(holder: dict[str, Any], name: str) -> int:
    value = holder.get(name)
    return sys.getrefcount(value)


#: What is counted for a value that only `holder` has: the count differs between Python versions.
_ALONE = _references({"value": object()}, "value")


def _held(
    sites: Sequence[PatchPoint], modules: _Modules, names: Iterable[str] | None = None
) -> Iterator[tuple[PatchPoint, tuple[str, types.ModuleType, str]]]:
    """Yield (patch point, (module name, module, name)) for each name in a module that refers to a
    function which the patch point has taken out of use.

    That is upstream's function while the patch point is installed, and our function afterwards.

    Args:
        sites: the sites whose functions are searched for.
        modules: pairs of a name and a module, to search.
        names: the names to check in each module; None checks all names.
    """
    by_id = {id(value): site for site in sites for value in (site.original, site.installed)}
    functions = Identities(value for site in sites for value in (site.original, site.installed))
    for module_name, module in modules if sites else ():
        values = namespace(module)
        if names is None and not functions.among(list(values.values())):
            continue
        for name in list(values) if names is None else filter(values.__contains__, names):
            held_object = values.get(name)
            site = by_id[id(held_object)] if held_object in functions else None
            if site is not None and held_object is not site.current:
                yield site, (module_name, module, name)


class Identities:
    """Tells whether a value is one of some objects, mostly functions, with few calls of `id()`.

    `id()` is audited: in a process with an audit hook, as recent releases of filelock install one,
    each call runs the hook, and a search asks for 300,000 values. Plain functions are keys of their
    own. An `Identities` refers to them, so it must be gone before their references are counted.
    """

    def __init__(self, objects: Iterable[Any]) -> None:
        functions: list[Any] = []
        nonfunctions: list[Any] = []
        for value in objects:
            (functions if type(value) is types.FunctionType else nonfunctions).append(value)
        self._functions = frozenset(functions)
        self._ids = frozenset(map(id, nonfunctions))
        self._kinds = tuple(set(map(type, nonfunctions)))  # no set: a class may have no hash

    def __contains__(self, value: Any) -> bool:
        if type(value) is types.FunctionType:
            return value in self._functions
        return type(value) in self._kinds and id(value) in self._ids

    def among(self, values: Iterable[Any]) -> list[Any]:
        """Return those of the values that are one of the objects, as often as they occur."""
        functions, ids = self._functions, self._ids
        kinds, function = self._kinds, types.FunctionType
        return [
            value
            for value in values
            if (
                value in functions
                if type(value) is function
                else type(value) in kinds and id(value) in ids
            )
        ]


ABSENT: Any = object()
"""The value of `raw` if the class inherits the function and does not define it."""

#: Attributes that `functools.lru_cache` adds to a function, and that upstream's code calls.
_CACHED = ("cache_clear", "cache_info", "cache_parameters")


class PatchPoint:
    """Replaces one Megatron function by ours, which calls patches' wrappers; can undo that.

    Args:
        target: any target whose address leads to this function.
        owner: the module or class that holds the function.
        raw: the value in the owner's `__dict__`: a function, staticmethod or classmethod; or
            `ABSENT`.
        inherited: the value in a base class's `__dict__`, if raw is `ABSENT`.
        held_elsewhere: the number of references to raw besides the owner's; None if not counted.
        inside: wrappers of other packages that raw has around upstream's function, outermost first.
        innermost: upstream's own function, which those wrappers call.
        upstream: a patch point of `innermost`, for names that still refer to it directly.
    """

    def __init__(
        self,
        target: Target,
        owner: Any,
        raw: Any,
        inherited: Any = None,
        held_elsewhere: int | None = None,
        inside: Sequence[Any] = (),
        innermost: Any = None,
        upstream: PatchPoint | None = None,
    ) -> None:
        self.target, self.owner, self.raw = target, owner, raw
        self.inside = who(inside) if inside else []
        self.innermost = innermost
        self._upstream = upstream
        stands = inherited if raw is ABSENT else raw
        self.original: Callable[..., Any] = unbound(stands)
        self.body = ""
        """Hash of upstream's body when the first patch landed."""
        self.layers: dict[str, Callable[..., Any]] = {}
        self.left: list[str] = []
        """Names that still refer to upstream's function, in modules that we may not change."""
        self.previous: PatchPoint | None = None
        """The patch point of this address before upstream's module was reloaded."""
        self.prefixes: frozenset[str] = frozenset()
        """Packages whose early-bound names are rebound."""
        self.is_installed = False
        self.holders: dict[str, list[Any]] = {}
        """The holders of upstream's function that `detours` found last, by attribute of this."""
        self._held_elsewhere = held_elsewhere
        self._cover: object = None
        """The object that had replaced our function when `uninstall` ran."""
        self._call = original = self.original

        @functools.wraps(original)
        def patched(*args: Any, **kwargs: Any) -> Any:
            return self._call(*args, **kwargs)

        for name in _CACHED:
            if hasattr(original, name):  # no part of a function's __dict__, which wraps() copies
                setattr(patched, name, getattr(original, name))
        self.function = patched
        self.installed: Any = type(stands)(patched) if stands is not original else patched

    @property
    def name(self) -> str:
        """The function's own name, the last part of the target's qualified name."""
        return self.target.qualname.rpartition(".")[2]

    @property
    def standing(self) -> Any:
        """The object to which the target's name refers now; None if its module or class is gone."""
        module = sys.modules.get(self.target.module)
        try:
            owner_there = None if module is None else find_owner(module, self.target.qualname)
        except AttributeError:  # the module is just being loaded again
            return None
        return namespace(self.owner).get(self.name) if owner_there is self.owner else None

    @property
    def in_place(self) -> bool:
        """True if the target's name still refers to our function, or to a wrapper that calls it."""
        return self._above() is not None

    @property
    def outside(self) -> list[str]:
        """Packages that have wrapped our function, outermost first."""
        above = self._above()
        return who(above) if above else []

    @property
    def replaced_by(self) -> str:
        """Name of the package whose object has replaced our function; "nothing" if the name is not
        bound any more.
        """
        value = self.standing
        return "nothing" if value is None else who([unbound(value)])[0]

    @property
    def bound_before(self) -> list[str]:
        """Names that modules bound to the function before it was patched, and that still refer to
        it because we may not change these modules; calls by these names bypass our function.

        They refer to upstream's function, or to another package's wrapper around it.
        """
        return [*self.left, *(self._upstream.left if self._upstream is not None else ())]

    def _above(self) -> list[Any] | None:
        value = self.standing
        if value is self.installed or value is self.function:
            return []
        if value is None or value is self.raw:
            return None  # upstream's function, or a wrapper that is older than ours
        reached = layers(value, lambda layer: layer is self.installed or layer is self.function)
        return None if reached is None else reached[0]

    def family(self) -> Iterator[PatchPoint]:
        """Yield this patch point and, recursively, the patch points below it: the one that had this
        address before the module was reloaded, and the one of upstream's function inside other
        packages' wrappers.
        """
        yield self
        for site in self._below():
            yield from site.family()

    def held(self) -> list[Any]:
        """Return the objects that this patch point refers to. An object is in the list once per
        reference.
        """
        items = [*vars(self).values(), unbound(self.raw) if self.raw is not self.original else None]
        for layer in self._chain():
            attributes = vars(layer).values()
            items += [
                *attributes,
                *(getattr(value, "__self__", None) for value in _methods(attributes)),
            ]
            items += layer.args if type(layer) is functools.partial else ()
        return items

    def containers(self) -> Iterator[Any]:
        """Yield this patch point's own objects that may refer to upstream's function."""
        yield from (vars(self), self.raw)
        for layer in self._chain():
            attributes = vars(layer)
            yield from (attributes, *_methods(attributes.values()))
            yield from (layer.args,) if type(layer) is functools.partial else ()

    def _below(self) -> Iterator[PatchPoint]:
        return filter(None, (self.previous, self._upstream))

    def _chain(self) -> Iterator[Any]:
        layer: Any = self._call
        while layer is not self.original:
            yield layer
            layer = layer.args[0]
        yield self.function

    def discard(self) -> None:
        """Drop the references to upstream's function.
        Call it only for a patch point that was never installed.

        A patch point refers to itself, so it would keep the function until the next garbage
        collection.
        """
        vars(self.function).clear()
        self._call = self.original = self.raw = self.innermost = self.installed = None  # type: ignore[assignment]
        for site in self._below():
            site.discard()

    def same_place(self, other: PatchPoint) -> bool:
        """Return True if `other` is for the same live function in the same module or class."""
        return (self.owner, self.raw, self.original) == (other.owner, other.raw, other.original)

    def add(self, patch_id: str, wrapper: Callable[..., Any]) -> None:
        """Add a patch's wrapper to the wrappers around the function."""
        self.layers[patch_id] = wrapper
        self._compose()
        if self._upstream is not None:
            self._upstream.add(patch_id, wrapper)

    def remove(self, patch_id: str) -> None:
        """Take a patch's wrapper off the function. Our function stays in place of upstream's until
        `uninstall`.
        """
        if self.layers.pop(patch_id, None) is not None:
            self._compose()
        for site in self._below():
            site.remove(patch_id)

    def _compose(self) -> None:
        call = self.original
        # By id, so that the order does not depend on the order of imports or of calls.
        for _, wrapper in sorted(self.layers.items(), reverse=True):
            # update_wrapper, so that a wrapper sees upstream's signature on its `original`.
            call = functools.update_wrapper(functools.partial(wrapper, call), self.original)
        self._call = call

    @property
    def current(self) -> Any:
        """The object that names should refer to: our function while installed, else upstream's."""
        return self.installed if self.is_installed else self.original

    def lead(self, module_name: str, module: types.ModuleType, name: str) -> None:
        """Bind a name in a module to this patch point's `current` function.
        If the module may not be changed, list the name in `left` instead.
        """
        full_name = f"{module_name}.{name}"
        if module is self.owner or any(
            module_name == prefix or module_name.startswith(f"{prefix}.")
            for prefix in self.prefixes
        ):
            namespace(module)[name] = self.current
        elif full_name not in self.left:
            self.left.append(full_name)

    def is_held_by_more_than(self, names: int) -> bool:
        """Return True if, before the installation, the replaced function may have had more than
        `names` references besides its owner's, so that some names that refer to it are yet to be
        found.

        The count from before the installation answers the first call; later calls return True.
        """
        holders, self._held_elsewhere = self._held_elsewhere, None
        return holders is None or holders > names

    def install(self, prefixes: Iterable[str], names: StaleReferences) -> None:
        """Bind the target's name in its module or class to our function. Add this patch point to
        `names`, whose `rebind()` then changes the other names that refer to upstream's function.

        Args:
            prefixes: packages whose early-bound names are rebound; names elsewhere are `left`.
            names: collects this site, to rebind its names later.
        """
        self.prefixes = frozenset(prefixes)
        self.is_installed = True
        if not self.in_place:  # if it is, another package may have wrapped it
            setattr(self.owner, self.name, self.installed)
        if isinstance(self.owner, types.ModuleType):
            names.follow(self)
        if self._upstream is not None:
            self._upstream.prefixes, self._upstream.is_installed = self.prefixes, True
            names.follow(self._upstream)

    def uninstall(self, names: StaleReferences) -> bool:
        """Bind the target's name to upstream's function again.
        Return False if another package's wrapper calls ours, so that this is impossible.

        In that case our function stays below that wrapper, and only passes calls on.
        """
        for site in self._below():
            site.uninstall(names)
        self.previous = None
        was_installed, self.is_installed = self.is_installed, False
        live = namespace(self.owner).get(self.name)
        replaced = live is not self.installed
        if not replaced and self.raw is ABSENT:
            delattr(self.owner, self.name)
        elif not replaced:
            setattr(self.owner, self.name, self.raw)
        if isinstance(self.owner, types.ModuleType):
            names.follow(self)
        self._cover = live if replaced and was_installed else None
        return not replaced or not self.in_place

    @property
    def leftover(self) -> str | None:
        """A sentence for the report if no patch uses our function any more, but it is bound again,
        or another package's object may bind it again; None otherwise.
        """
        if self.is_installed:
            return None
        live, address = namespace(self.owner).get(self.name), self.target.address
        if live is self.installed:
            return (
                f"somebody has put our function back at {address}: it does nothing, and revert() "
                "takes it away again"
            )
        if live is None or live is not self._cover:
            return None
        kind = type(live)
        return (
            f"{address} is a {kind.__module__}.{kind.__qualname__} by now: code that takes that "
            "away and puts back what was there before puts back our function, which does nothing"
        )


def _methods(values: Iterable[Any]) -> Iterator[Any]:
    """Yield the built-in methods among `values`, such as a cached function's `cache_clear`."""
    return (value for value in list(values) if type(value) is types.BuiltinMethodType)


def open_patch_point(target: Target, body: Body | None) -> PatchPoint:
    """Make a `PatchPoint` for the target's live function. It installs nothing.

    Args:
        target: any target that leads to the function.
        body: the function's body in upstream's source; None to read it only where it is needed.

    Raises:
        Conflict: the live function was not compiled from that source.
        AttributeError: the module lacks the function.
    """
    inside, innermost = check_patch_point(target, body)
    owner = find_owner(sys.modules[target.module], target.qualname)
    name = target.qualname.rpartition(".")[2]
    held_elsewhere = references(namespace(owner), name)  # as long as nothing here holds it
    raw = namespace(owner).get(name, ABSENT)
    if raw is ABSENT:
        inherited = next(vars(base)[name] for base in owner.__mro__ if name in vars(base))
        return PatchPoint(target, owner, ABSENT, inherited=inherited)
    # A method is looked up at each call; a module's function may have been imported by name before
    # another package wrapped it.
    early = inside and isinstance(owner, types.ModuleType)
    return PatchPoint(
        target,
        owner,
        raw,
        held_elsewhere=held_elsewhere,
        inside=inside,
        innermost=innermost if inside else None,
        upstream=PatchPoint(target, owner, innermost) if early else None,
    )


def check_patch_point(target: Target, body: Body | None) -> tuple[list[Any], Any]:
    """Check that the target's live function was compiled from its source, or is a wrapper around
    such a function; make no patch point.

    A patch point refers to itself: one that is dropped would keep the function alive until the next
    garbage collection.

    Returns:
        Other packages' wrappers around upstream's function, outermost first, and that function.
        Without such wrappers the list is empty, and the function may be None.

    Raises:
        Conflict: the live function was not compiled from that source, and calls no function that
            was.
        AttributeError: the module lacks the function.
    """
    module = sys.modules[target.module]
    owner = find_owner(module, target.qualname)
    name = target.qualname.rpartition(".")[2]
    raw = namespace(owner).get(name, ABSENT)
    if raw is ABSENT:
        if not any(name in vars(base) for base in getattr(owner, "__mro__", ())):
            raise AttributeError(f"{target.module} has no {target.qualname}")
        return [], None
    from .source import as_compiled, read_body  # apply() before Megatron may do without

    function = unbound(raw)
    if as_compiled(function, module, target.qualname) and (
        # The source may have a definition that the compiler has dropped, as dead.
        body is None or body.line == function.__code__.co_firstlineno
    ):
        return [], None
    body = body or read_body(str(module.__file__), target.qualname)
    if body is None:
        raise AttributeError(f"{module.__file__} defines no {target.qualname}")
    foreign = _foreign(raw, module, body, target.qualname)
    if foreign is None:
        return [], None
    reached = layers(raw, lambda layer: _is_upstream(layer, module, body, target.qualname))
    if reached is None:
        (package,) = who([unbound(raw)])
        is_known = package in ("builtins", package_of(module.__name__))
        raise Conflict(f"{target.address} is {foreign}{'' if is_known else f', of {package}'}")
    above, upstream = reached
    if package_of(__name__) in who(above):
        raise Conflict(f"{target.address} is patched by another copy of this package")
    decorators = len(body.tree.decorator_list) - isinstance(raw, (staticmethod, classmethod))
    return above[: max(0, len(above) - decorators)], upstream


def _is_upstream(value: Any, module: types.ModuleType, body: Body, qualname: str) -> bool:
    if type(value) is not types.FunctionType or value.__code__.co_name != body.tree.name:
        return False
    return _undecorated(value, module, body, qualname) is None


def find_owner(module: types.ModuleType, qualname: str) -> Any:
    """Return the module, or the class in it, that defines the last part of `qualname`.

    Raises:
        AttributeError: the module lacks the class.
    """
    owner: Any = module
    for part in qualname.split(".")[:-1]:
        owner = namespace(owner).get(part)
        if not isinstance(owner, type):
            raise AttributeError(f"{module.__name__} has no {qualname}")
    return owner


def unbound(raw: Any) -> Any:
    """Return the function in a `staticmethod` or `classmethod`, or the value itself if neither."""
    return raw.__func__ if type(raw) in (staticmethod, classmethod) else raw


def _foreign(raw: Any, module: types.ModuleType, body: Body, qualname: str) -> str | None:
    # A function keeps the globals of the module that compiled it, whatever functools.wraps copied
    # onto it. Only as many layers are looked through as upstream itself put there.
    function = unbound(raw)
    decorators = len(body.tree.decorator_list)
    if function is not raw:
        decorators -= 1  # that one is no layer around the function
    for _ in range(decorators):
        function = getattr(function, "__wrapped__", function)
    return _undecorated(function, module, body, qualname)


def _undecorated(function: Any, module: types.ModuleType, body: Body, qualname: str) -> str | None:
    """Return None if a function, without decorators around it, was compiled from `body`, which is
    upstream's source. Otherwise say what the function is instead, as the end of a sentence for an
    error message, such as `other_function from file.py:12`.
    """
    from .source import difference  # with the body's source, which apply() may do without

    if type(function) is not types.FunctionType:
        kind = type(function)
        return f"a {kind.__module__}.{kind.__qualname__}, not upstream's function"
    code = function.__code__
    # Source patchers compile again in upstream's globals, under a file name of their own.
    names = {path.rpartition("/")[2] for path in (code.co_filename, str(module.__file__))}
    if function.__globals__ is not namespace(module) or len(names) > 1:
        return f"{function.__qualname__} from {code.co_filename}:{code.co_firstlineno}"
    return difference(code, body, qualname)
