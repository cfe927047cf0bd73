"""Changed sources of a function, and of what is around it, as a later release might have them.

Every operator goes through its sites in order, so that a seed chooses the same mutants on every
machine. A mutant's source is made when it is asked for.
"""

from __future__ import annotations

import ast
import copy
import functools
import random
import re
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megatron_idempotent.patching import Patch, Target

Definition = ast.FunctionDef
#: Changes a copy of the function in place, or returns the source by itself.
Change = Callable[[Definition], "str | None"]
Sites = Iterable[tuple[str, Change]]
#: From the function to a node: names of fields and positions in lists.
Path = tuple["str | int", ...]

_DECORATORS = """
def _fuzz_polite(function):
    import functools
    @functools.wraps(function)
    def call(*args, **kwargs):
        return function(*args, **kwargs)
    return call

def _fuzz_rude(function):
    def call(*args, **kwargs):
        return function(*args, **kwargs)
    return call

"""

_LAST = "return (iteration, num_floating_point_operations_so_far)"
#: By patch: the function, what its `fixed_when` looks for in other words, and the statement that
#: this stands before.
REPAIRS = {
    "failed-dist-save-hangs": (
        "save",
        "metadata_finalize_fn = sharing_errors(metadata_finalize_fn, torch.distributed.barrier)",
        "async_request.finalize_fns.append(metadata_finalize_fn)",
    ),
    "gc-stays-off": ("train", "getattr(gc, 'enable')()", _LAST),
    "grad-scale-func": (
        "get_megatron_optimizer",
        "vars(get_model_config(model_chunks[0])).update(grad_scale_func=optimizers[0].scale_loss)",
        "return ChainedOptimizer(optimizers)",
    ),
    "no-sync-func-reentry": ("train", "setattr(config, 'no_sync_func', None)", _LAST),
    "optimizer-step-rewrapped": ("train", "delattr(optimizer, 'step')", _LAST),
    "param-sync-func-lost": (
        "train",
        "vars(config).update(param_sync_func=model[0].start_param_sync)",
        _LAST,
    ),
    "pipeline-seed-offset": (
        "model_parallel_cuda_manual_seed",
        "seed = seed + 100 * torch.distributed.get_rank()",
        "offset = seed + 2718",
    ),
    "train-interval-timer": ("train", "get_timers()._timers['interval-time'].reset()", _LAST),
    "train-iteration-lost": ("train", "vars(get_args()).update(iteration=iteration)", _LAST),
}


@dataclass(frozen=True)
class Mutant:
    """One change of one function."""

    function: str
    operator: str
    site: str
    _tree: Definition
    _change: Change

    @cached_property
    def source(self) -> str | None:
        """Code of a module that defines the function; None where the change makes no program."""
        tree = copy.deepcopy(self._tree)
        try:
            text = self._change(tree)
            text = text or ast.unparse(ast.fix_missing_locations(tree))
            compile(text, self.function, "exec")
        except (SyntaxError, ValueError):
            return None
        return text

    def __str__(self) -> str:
        return f"{self.function}: {self.operator}: {self.site}"


def mutants(source: str) -> list[Mutant]:
    """Every mutant of every operator, of a function's source from its first decorator on."""
    tree = _parsed(source)
    return [
        Mutant(tree.name, name, site, tree, change)
        for name, sites in OPERATORS.items()
        for site, change in sites(tree)
    ]


def drawn(source: str, generator: random.Random) -> Mutant:
    """One mutant of an operator that is drawn first: only its sites are looked for."""
    tree = _parsed(source)
    for name in generator.sample([*OPERATORS], len(OPERATORS)):
        if sites := list(OPERATORS[name](tree)):
            site, change = generator.choice(sites)
            return Mutant(tree.name, name, site, tree, change)
    raise AssertionError("every function can be decorated")


def sample(all_of_them: list[Mutant], count: int, seed: int) -> list[Mutant]:
    """Take that number of mutants that are programs, in turn from each operator: of rare ones
    all."""
    generator = random.Random(seed)
    by_operator: dict[str, list[Mutant]] = {}
    for mutant in all_of_them:
        by_operator.setdefault(mutant.operator, []).append(mutant)
    for group in by_operator.values():
        generator.shuffle(group)
    chosen: list[Mutant] = []
    while any(by_operator.values()):
        for group in by_operator.values():
            while group and (mutant := group.pop()).source is None:
                pass
            else:
                if len(chosen) < count and mutant.source is not None and mutant not in chosen[-1:]:
                    chosen.append(mutant)
        if len(chosen) >= count:
            break
    return chosen


def cosmetic(source: str) -> Iterator[tuple[str, str]]:
    """The same code in other words: nothing that runs is different."""
    tree = _parsed(source)
    yield "formatted", ast.unparse(tree)
    start = 1 if ast.get_docstring(tree) is not None else 0
    tree.body[:start] = []
    yield "without a docstring", ast.unparse(tree)
    tree.body.insert(0, ast.Expr(ast.Constant("Something else.")))
    yield "with another docstring", ast.unparse(ast.fix_missing_locations(tree))
    lines = source.splitlines()
    plain = ast.dump(ast.parse(source))
    for number in range(1, len(lines), max(1, len(lines) // 10)):
        text = "\n".join([*lines[:number], "# a remark", "", *lines[number:]])
        if ast.dump(ast.parse(text)) == plain:  # not inside of a text
            yield f"with a remark above line {number}", text


def _parsed(source: str) -> Definition:
    (tree,) = ast.parse(source).body
    assert isinstance(tree, ast.FunctionDef)
    return tree


OPERATORS: dict[str, Callable[[Definition], Sites]] = {}
"""Operator → a function that returns sites, each with its label and the change there."""


def _operator(
    sites: Callable[[Definition], Iterable[tuple[str, Any]]],
) -> Callable[[Callable[..., Any]], None]:
    """Add an operator: the decorated function changes what it is given of a site, in a tree."""

    def decorated(change: Callable[..., Any]) -> None:
        OPERATORS[change.__name__.strip("_")] = lambda tree: [
            (label, functools.partial(change, where)) for label, where in sites(tree)
        ]

    return decorated


def _cases(name: str, changes: dict[str, Change]) -> None:
    """Add an operator that has the same changes for every function."""
    OPERATORS[name] = lambda tree: changes.items()


# The signature.


def _each_parameter(tree: Definition) -> Iterator[tuple[str, str]]:
    return ((name, name) for name in _parameters(tree))


def _each_argument(tree: Definition, label: str = "{}") -> Iterator[tuple[str, int]]:
    return ((label.format(a.arg), index) for index, a in enumerate(tree.args.args))


@_operator(_each_parameter)
def _rename_parameter(name: str, tree: Definition) -> None:
    for node in ast.walk(tree):
        if isinstance(node, ast.arg) and node.arg == name:
            node.arg = f"{name}_now"
        elif isinstance(node, ast.Name) and node.id == name:
            node.id = f"{name}_now"


@_operator(_each_parameter)
def _parameter_from_kwargs(name: str, tree: Definition) -> None:
    _take_out(tree.args, name)
    tree.args.kwarg = tree.args.kwarg or ast.arg("others")
    _insert(tree, f"{name} = {tree.args.kwarg.arg}.pop({name!r}, None)")


@_operator(_each_parameter)
def _parameter_is_copied(name: str, tree: Definition) -> None:
    # Same name in the signature, another thing in the body.
    _insert(tree, f"{name} = __import__('copy').copy({name})")


@_operator(_each_parameter)
def _alias_of_parameter(name: str, tree: Definition) -> None:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == name:
            node.id = f"{name}_here"
    _insert(tree, f"{name}_here = {name}")


@_operator(lambda tree: [(name, name) for name in ("first", "last", "keyword")])
def _add_parameter(where: str, tree: Definition) -> None:
    added, given = ast.arg("fuzz"), tree.args
    if where == "first":
        given.args.insert(0, added)
        given.defaults = [ast.Constant(None)] * len(given.args)
    elif where == "last":
        given.args.append(added)
        given.defaults.append(ast.Constant(None))
    else:
        given.kwonlyargs.append(added)
        given.kw_defaults.append(ast.Constant(None))


@_operator(lambda tree: [(f"{i} and {i + 1}", i) for i in range(len(tree.args.args) - 1)])
def _swap_parameters(index: int, tree: Definition) -> None:
    both = tree.args.args
    both[index], both[index + 1] = both[index + 1], both[index]


@_operator(_each_argument)
def _change_default(index: int, tree: Definition) -> None:
    arguments = tree.args
    start = len(arguments.args) - len(arguments.defaults)
    if index < start:  # it may be left out, and so may all after it
        arguments.defaults[:0] = [ast.Constant(None)] * (start - index)
        return
    default = arguments.defaults[index - start]
    value = default.value if isinstance(default, ast.Constant) else None
    new = not value if isinstance(value, bool) else None if value else 1
    arguments.defaults[index - start] = ast.Constant(new)


@_operator(lambda tree: [("all", None)])
def _no_default(_: None, tree: Definition) -> None:
    tree.args.defaults = []


@_operator(lambda tree: _each_argument(tree, "from {} on"))
def _keyword_only(index: int, tree: Definition) -> None:
    arguments = tree.args
    missing = len(arguments.args) - len(arguments.defaults)
    defaults = [*[None] * missing, *arguments.defaults]
    arguments.kwonlyargs[:0] = arguments.args[index:]
    arguments.kw_defaults[:0] = defaults[index:]
    arguments.args = arguments.args[:index]
    arguments.defaults = [d for d in defaults[:index] if d is not None]


@_operator(lambda tree: [("all", None)])
def _positional_only(_: None, tree: Definition) -> None:
    tree.args.posonlyargs, tree.args.args = tree.args.args, []


@_operator(lambda tree: [("beside", False), ("inside", True)])
def _any_arguments(inside: bool, tree: Definition) -> str:
    name, tree.name = tree.name, "_fuzz_inner"
    head, text = f"def {name}(*args, **kwargs):\n", ast.unparse(tree)
    above = head + textwrap.indent(text, "    ") + "\n" if inside else f"{text}\n\n{head}"
    return f"{above}    return _fuzz_inner(*args, **kwargs)\n"


# What kind of function it is.


def _inserting(text: str) -> Change:
    return lambda tree: _insert(tree, text)


_cases(
    "another_kind",
    {
        "async": lambda tree: f"async {ast.unparse(tree)}",
        "generator": _inserting("yield"),
        "generator that yields nothing": _inserting("yield from ()"),
    },
)


def _under(*decorators: str) -> Change:
    above = "".join(f"@{decorator}\n" for decorator in decorators)
    return lambda tree: f"{_DECORATORS}{above}{ast.unparse(tree)}"


_cases(
    "decorated",
    {
        "staticmethod": _under("staticmethod"),
        "with wraps": _under("_fuzz_polite"),
        "without wraps": _under("_fuzz_rude"),
        "both": _under("_fuzz_polite", "_fuzz_rude"),
        "lambda": _under("(lambda f: lambda *a, **k: f(*a, **k))"),
        "partial": _under("(lambda f: __import__('functools').partial(f))"),
        "result in a tuple": _under(
            "(lambda f: __import__('functools').wraps(f)(lambda *a, **k: (f(*a, **k),)))"
        ),
        "context manager": _under(
            "__import__('contextlib').nullcontext().__class__ and _fuzz_rude"
        ),
        "no_grad": _under("__import__('torch').no_grad()"),
    },
)


def _beside(template: str) -> Change:
    def change(tree: Definition) -> str:
        text, other = ast.unparse(tree), copy.deepcopy(tree)
        other.name = "_fuzz_other"
        indented = textwrap.indent(text, "    ")
        return template.format(
            name=tree.name, text=text, indented=indented, other=ast.unparse(other)
        )

    return change


# What stands there at run time is not the definition that one reads.
_cases(
    "another_function",
    {
        "a lambda": _beside("{text}\n_fuzz = {name}\n{name} = lambda *a, **k: _fuzz(*a, **k)\n"),
        "another def": _beside("{text}\n\n{other}\n{name} = _fuzz_other\n"),
        "a dead copy behind": _beside("{text}\n\nif False:\n{indented}\n"),
        "a dead copy before": _beside("if False:\n{indented}\n\n{other}\n{name} = _fuzz_other\n"),
        "wrapped behind": _beside(_DECORATORS + "{text}\n{name} = _fuzz_polite({name})\n"),
    },
)


# What it returns.

_ToResult = Callable[[ast.expr], "ast.expr | None"]


def _of_tuple(change: Callable[[list[ast.expr]], ast.expr]) -> _ToResult:
    return lambda value: change(value.elts) if isinstance(value, ast.Tuple) else None


def _items(change: Callable[[list[ast.expr]], list[ast.expr]]) -> _ToResult:
    return _of_tuple(lambda items: ast.Tuple(change(items), ast.Load()))


def _named_tuple(value: ast.expr) -> ast.expr:
    parts = value.elts if isinstance(value, ast.Tuple) else [value]
    names = " ".join(f"item{index}" for index in range(len(parts)))
    maker = f"__import__('collections').namedtuple('Result', {names!r})"
    return ast.Call(ast.parse(maker, mode="eval").body, parts, [])


def _called(name: str, value: ast.expr) -> ast.expr:
    return ast.Call(ast.Name(name, ast.Load()), [value], [])


_RESULTS: dict[str, _ToResult] = {
    "one item more": _items(lambda v: [*v, ast.Constant(None)]),
    "one item more in front": _items(lambda v: [ast.Constant(0), *v]),
    "one item less": _items(lambda v: v[:-1]),
    "first item less": _items(lambda v: v[1:]),
    "two items swapped": _items(lambda v: [v[1], v[0], *v[2:]]),
    "all items swapped": _items(lambda v: v[::-1]),
    "fourth item moved": _items(lambda v: [*v[:3], *v[4:], *v[3:4]]),
    "dict": _of_tuple(lambda v: ast.Dict([ast.Constant(f"item{i}") for i in range(len(v))], v)),
    "named tuple": _named_tuple,
    "list": _of_tuple(lambda v: ast.List(v, ast.Load())),
    "list of it": lambda v: ast.List([v], ast.Load()),
    "with something": lambda v: ast.Tuple([v, ast.Constant(None)], ast.Load()),
    "iterator": lambda v: _called("iter", v) if isinstance(v, ast.Tuple) else None,
    "text": lambda v: _called("repr", v),
    "nothing": lambda v: ast.Constant(None),
}


def _results(tree: Definition) -> Iterator[tuple[str, tuple[str, int | None]]]:
    yield from ((name, (name, None)) for name in _RESULTS)
    count = sum(isinstance(node, ast.Return) for node in _own(tree))
    for index in range(count if count > 1 else 0):
        for name in ("one item more", "nothing"):
            yield f"{name} in return {index}", (name, index)


@_operator(_results)
def _another_result(which: tuple[str, int | None], tree: Definition) -> str | None:
    name, only = which
    returns = [node for node in _own(tree) if isinstance(node, ast.Return) and node.value]
    done = False
    for index, node in enumerate(returns):
        new = _RESULTS[name](node.value) if node.value and only in (None, index) else None
        if new is not None:
            node.value, done = new, True
    return None if done else "not a program"


# The statements.


def _each_statement(tree: Definition) -> Iterator[tuple[str, Path]]:
    return ((_label(statement), path) for path, statement in _statements(tree))


def _on_statements(
    name: str,
    change: Callable[[ast.stmt], list[ast.stmt]],
    only: Callable[[ast.stmt], bool] = lambda s: True,
) -> None:
    """Add an operator that puts other statements in the place of one."""
    OPERATORS[name] = lambda tree: [
        (_label(s), _replacing(path, change)) for path, s in _statements(tree) if only(s)
    ]


def _stays(s: ast.stmt) -> bool:
    return not isinstance(s, (ast.Return, ast.FunctionDef))


_on_statements("delete", lambda s: [ast.Pass()])
_on_statements("duplicate", lambda s: [s, copy.deepcopy(s)], _stays)


@_operator(_each_statement)
def _move_down(path: Path, tree: Definition) -> str | None:
    block, index = _block(tree, path)
    if index + 1 == len(block):
        return "not a program"
    block[index], block[index + 1] = block[index + 1], block[index]
    return None


@_operator(_each_statement)
def _move_to_the_end(path: Path, tree: Definition) -> str | None:
    block, index = _block(tree, path)
    if index + 2 >= len(block):
        return "not a program"
    block.insert(len(block) - 2, block.pop(index))
    return None


@_operator(_each_statement)
def _move_to_the_front(path: Path, tree: Definition) -> None:
    block, index = _block(tree, path)
    tree.body.insert(1, block.pop(index))
    if not block:
        block.append(ast.Pass())


_CONDITIONS = ("not __debug__", "'FUZZ' not in __import__('os').environ")


@_operator(
    lambda tree: [
        (f"{test}: {_label(statement)}", (test, path))
        for path, statement in _statements(tree)
        for test in _CONDITIONS
    ]
)
def _make_conditional(where: tuple[str, Path], tree: Definition) -> None:
    parsed = ast.parse(where[0], mode="eval").body
    _replacing(where[1], lambda s: [ast.If(parsed, [s], [])])(tree)


_on_statements("make_unconditional", lambda s: s.body, lambda s: isinstance(s, ast.If))  # type: ignore[attr-defined]


def _on_tests(name: str, change: Callable[[ast.expr], ast.expr]) -> None:
    def changed(s: Any) -> list[ast.stmt]:
        s.test = change(s.test)
        return [s]

    _on_statements(name, changed, lambda s: isinstance(s, (ast.If, ast.While, ast.Assert)))


_on_tests("negate", lambda test: ast.UnaryOp(ast.Not(), test))
_on_tests("weaken", lambda test: ast.BoolOp(ast.Or(), [test, ast.Constant(True)]))
_on_tests("strengthen", lambda test: ast.BoolOp(ast.And(), [test, ast.Constant(False)]))


def _tried(s: ast.stmt) -> list[ast.stmt]:
    handler = ast.ExceptHandler(ast.Name("Exception", ast.Load()), None, [ast.Pass()])
    return [ast.Try([s], [handler], [], [])]


_on_statements("protect", _tried, _stays)


def _early_returns(tree: Definition) -> Iterator[tuple[str, Path | int]]:
    yield from ((label, path) for label, path in _each_statement(tree) if len(path) == 2)
    last = tree.body[-1]
    if isinstance(last, ast.Return) and isinstance(last.value, ast.Tuple):
        yield "at once", len(last.value.elts)


@_operator(_early_returns)
def _return_early(where: Path | int, tree: Definition) -> None:
    if isinstance(where, int):
        _insert(tree, f"return {', '.join('0' * where)}")
        return
    last = tree.body[-1]
    value = last.value if isinstance(last, ast.Return) else None
    _replacing(where, lambda s: [ast.Return(copy.deepcopy(value)), s])(tree)


def _pieces(tree: Definition) -> Iterator[tuple[str, Path]]:
    leaves = (ast.Return, ast.Break, ast.Continue, ast.Yield, ast.FunctionDef)
    for path, statement in _statements(tree):
        if not any(isinstance(node, leaves) for node in ast.walk(statement)):
            yield _label(statement), path


@_operator(_pieces)
def _outline(path: Path, tree: Definition) -> None:
    # A statement becomes a function in the function, called where it stood.
    stored = [
        node.id
        for node in ast.walk(_node(tree, path))  # type: ignore[arg-type]
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    ]
    helper, call = ast.parse("def _fuzz_part():\n    pass\n_fuzz_part()").body

    def outlined(s: ast.stmt) -> list[ast.stmt]:
        inner = [*([ast.Nonlocal(sorted(set(stored)))] if stored else []), s]
        helper.body = inner  # type: ignore[attr-defined]
        return [helper, call]

    _replacing(path, outlined)(tree)
    # A name that only this statement binds has to be bound outside for `nonlocal`.
    known = set(_parameters(tree))
    for name in dict.fromkeys(sorted(stored)):
        if name not in known:
            _insert(tree, f"if not __debug__: {name} = None")


def _around(head: str) -> Change:
    def change(tree: Definition) -> None:
        (outer,) = ast.parse(f"{head}\n    pass").body
        outer.body = tree.body  # type: ignore[attr-defined]
        tree.body = [outer]

    return change


# All of it, with something around.
_cases(
    "in_a_with",
    {
        "nullcontext": _around("with __import__('contextlib').nullcontext():"),
        "suppress": _around("with __import__('contextlib').suppress(ValueError):"),
        "while": _around("while True:"),
        "for": _around("for _fuzz in range(1):"),
    },
)


def _repairs(tree: Definition) -> Iterator[tuple[str, tuple[str, Path]]]:
    for patch_id, (function, repair, before) in REPAIRS.items():
        places = [path for path, each in _statements(tree) if ast.unparse(each) == before]
        if tree.name == function and places:
            yield patch_id, (repair, places[-1])


@_operator(_repairs)
def _repair(where: tuple[str, Path], tree: Definition) -> None:
    _replacing(where[1], lambda s: [*ast.parse(where[0]).body, s])(tree)


# The expressions.


def _on_expressions(change: Callable[[Any], ast.expr | None]) -> None:
    """Add an operator that puts another expression in the place of one, or None for no site."""

    def changed(path: Path, tree: Definition) -> None:
        new, holder, last = change(_node(tree, path)), _node(tree, path[:-1]), path[-1]
        if isinstance(last, int):
            holder[last] = new  # type: ignore[index]
        else:
            setattr(holder, last, new)

    def sites(tree: Definition) -> Sites:
        for path, expression in _expressions(tree, ()):
            if path[0] == "body" and change(copy.deepcopy(expression)) is not None:
                label = f"{ast.unparse(expression)[:60]} at {expression.lineno}"
                yield label, functools.partial(changed, path)

    OPERATORS[change.__name__.strip("_")] = sites


@_on_expressions
def _change_constant(node: Any) -> ast.expr | None:
    value = node.value if isinstance(node, ast.Constant) else ...
    if isinstance(value, bool) or value is None:
        return ast.Constant(not value)
    if isinstance(value, (int, float)):
        return ast.Constant(value + 1)
    return ast.Constant(f"{value}_now") if isinstance(value, str) else None


@_on_expressions
def _rename_call(node: Any) -> ast.expr | None:
    if not isinstance(node, ast.Call):
        return None
    if isinstance(node.func, ast.Attribute):
        node.func.attr += "_now"
    elif isinstance(node.func, ast.Name):
        node.func.id += "_now"
    return node


@_on_expressions
def _stub_call(node: Any) -> ast.expr | None:
    return ast.Constant(None) if isinstance(node, ast.Call) else None


@_on_expressions
def _drop_argument(node: Any) -> ast.expr | None:
    if not isinstance(node, ast.Call) or not (node.args or node.keywords):
        return None
    (node.keywords or node.args).pop()
    return node


@_on_expressions
def _rename_attribute(node: Any) -> ast.expr | None:
    if not isinstance(node, ast.Attribute):
        return None
    node.attr += "_now"
    return node


@_on_expressions
def _ask_politely(node: Any) -> ast.expr | None:
    # The same in another spelling.
    if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Load):
        return None
    name, missing = ast.Constant(node.attr), ast.Constant(None)
    return ast.Call(ast.Name("getattr", ast.Load()), [node.value, name, missing], [])


def _sets_attribute(s: ast.stmt) -> bool:
    return isinstance(s, ast.Assign) and [type(t) for t in s.targets] == [ast.Attribute]


def _set_politely(s: Any) -> list[ast.stmt]:
    (target,) = s.targets
    arguments = [target.value, ast.Constant(target.attr), s.value]
    return [ast.Expr(ast.Call(ast.Name("setattr", ast.Load()), arguments, []))]


_on_statements("set_politely", _set_politely, _sets_attribute)


# Walking trees and changing them.


def _parameters(tree: Definition) -> list[str]:
    arguments = tree.args
    return [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]


def _take_out(arguments: ast.arguments, name: str) -> None:
    index = [argument.arg for argument in arguments.args].index(name)
    start = len(arguments.args) - len(arguments.defaults)
    if index >= start:
        del arguments.defaults[index - start]
    del arguments.args[index]


def _insert(tree: Definition, text: str) -> None:
    start = 1 if ast.get_docstring(tree) is not None else 0
    tree.body[start:start] = (
        ast.parse(text).body if "return" not in text and "yield" not in text else _in_function(text)
    )


def _in_function(text: str) -> list[ast.stmt]:
    (function,) = ast.parse(f"def f():\n    {text}").body
    assert isinstance(function, ast.FunctionDef)
    return function.body


def _own(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes in order, without those of functions inside."""
    for child in ast.iter_child_nodes(tree):
        if not isinstance(child, (ast.FunctionDef, ast.Lambda, ast.ClassDef)):
            yield child
            yield from _own(child)


def _statements(tree: Definition) -> Iterator[tuple[Path, ast.stmt]]:
    """Every statement and the way to it, without docstring and functions inside."""

    def visit(node: ast.AST, path: Path) -> Iterator[tuple[Path, ast.stmt]]:
        for name in ("body", "orelse", "finalbody"):
            for index, statement in enumerate(getattr(node, name, [])):
                if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                    continue
                if isinstance(statement, (ast.Global, ast.Nonlocal, ast.Pass)):
                    continue
                yield (*path, name, index), statement
                if not isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
                    yield from visit(statement, (*path, name, index))

    yield from visit(tree, ())


def _node(tree: ast.AST, path: Path) -> object:
    found: object = tree
    for step in path:
        found = found[step] if isinstance(step, int) else getattr(found, step)  # type: ignore[index]
    return found


def _block(tree: ast.AST, path: Path) -> tuple[list[ast.stmt], int]:
    block, index = _node(tree, path[:-1]), path[-1]
    assert isinstance(block, list)
    assert isinstance(index, int)
    return block, index


def _replacing(path: Path, change: Callable[[ast.stmt], list[ast.stmt]]) -> Change:
    def changed(tree: Definition) -> None:
        block, index = _block(tree, path)
        block[index : index + 1] = change(block[index])

    return changed


def _expressions(node: ast.AST, path: Path) -> Iterator[tuple[Path, ast.expr]]:
    for name, value in ast.iter_fields(node):
        if isinstance(value, ast.expr):
            yield (*path, name), value
            yield from _expressions(value, (*path, name))
        elif isinstance(value, ast.AST):
            yield from _expressions(value, (*path, name))
        for index, item in enumerate(value if isinstance(value, list) else ()):
            if isinstance(item, ast.expr):
                yield (*path, name, index), item
            if isinstance(item, ast.AST):
                yield from _expressions(item, (*path, name, index))


def _label(statement: ast.stmt) -> str:
    return f"{ast.unparse(statement).splitlines()[0][:60]} at {statement.lineno}"


# What is around the functions that are wrapped.


@dataclass(frozen=True)
class Around:
    """One change of Megatron's sources beside the bodies of wrapped functions."""

    operator: str
    site: str
    change: Callable[[str, str], str]
    """Takes a module and its text, and returns the changed text."""
    concerns: Callable[[Patch, frozenset[str]], bool | None]
    """Takes a patch and the names in its wrappers' bytecode. Returns True if it has to be refused,
    False if it has to be applied, None if it does not matter."""

    def __str__(self) -> str:
        return f"{self.operator}: {self.site}"


_Texts = Callable[[str], "str | None"]


def renames(
    text_of: _Texts, targets: Sequence[Target], *, without: frozenset[str]
) -> Iterator[Around]:
    """Every name that wrapped modules, and those that settings are in, define: renamed everywhere.

    Args:
        text_of: returns a module's source.
        targets: what is wrapped.
        without: names that are Python's and torch's, too.
    """
    homes = dict.fromkeys([target.module for target in targets])
    homes |= dict.fromkeys(f"megatron.core.{name}" for name in SETTINGS)
    wrapped = {part for target in targets for part in target.qualname.split(".")}
    names: dict[str, None] = {}
    for module in homes:
        for node in ast.walk(ast.parse(text_of(module) or "")):
            names |= dict.fromkeys(_defined(node))
    for name in names:
        if name not in wrapped | without and not name.startswith("__"):
            rename = functools.partial(re.compile(rf"\b{name}\b").sub, f"{name}_now")
            yield Around("rename", name, lambda _, text, rename=rename: rename(text), _using(name))


#: Modules with settings that wrappers read.
SETTINGS = (
    "model_parallel_config",
    "transformer.transformer_config",
    "distributed.distributed_data_parallel_config",
    "parallel_state",
    "timers",
)


def _defined(node: ast.AST) -> Iterator[str]:
    if isinstance(node, (ast.ClassDef, ast.Module)):
        for each in node.body:
            if isinstance(each, (ast.FunctionDef, ast.ClassDef)):
                yield each.name
            elif isinstance(each, (ast.Assign, ast.AnnAssign)):
                parts = each.targets if isinstance(each, ast.Assign) else [each.target]
                yield from (part.id for part in parts if isinstance(part, ast.Name))
    elif (
        isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    ):
        yield node.attr


def slots(text_of: _Texts, targets: Sequence[Target]) -> Iterator[Around]:
    """`__slots__` in every class of wrapped modules that has no base class."""
    for home in dict.fromkeys(target.module for target in targets):
        for owner in re.findall(r"^class (\w+)(?:\(\))?:$", text_of(home) or "", re.MULTILINE):

            def change(module: str, text: str, home: str = home, owner: str = owner) -> str:
                if module != home:
                    return text
                return re.sub(
                    rf"^(class {owner}\b.*:)$", r"\1\n    __slots__ = ()", text, flags=re.M
                )

            def concerns(
                patch: Patch, used: frozenset[str], home: str = home, owner: str = owner
            ) -> bool | None:
                wrapped = f"{home}:{owner}."
                mine = any(target.address.startswith(wrapped) for target in patch.targets)
                # An attribute of ours, and not a module that is imported.
                keeps = any("_megatron_idempotent" in name for name in used)
                return True if mine and keeps else None

            yield Around("slots", f"{home}:{owner}", change, concerns)


@functools.lru_cache(maxsize=1024)
def _tree(text: str) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of texts in upstream's modules
        return ast.parse(text)


def keywords(
    text_of: _Texts, modules: Iterable[str], passed: frozenset[tuple[str, str]]
) -> Iterator[Around]:
    """Every keyword that a wrapper passes: renamed in each function of that name.

    Args:
        text_of: returns a module's source.
        modules: the modules that are looked through.
        passed: names of functions, each with a keyword.
    """
    texts = [text for home in modules if (text := text_of(home))]
    for name, keyword in sorted(passed):
        change = functools.partial(_with_parameter_renamed, name, keyword)
        if any(change("", text) != text for text in texts if f"def {name}(" in text):
            yield Around("keyword", f"{name}({keyword})", change, _using((name, keyword)))


def _with_parameter_renamed(name: str, word: str, module: str, text: str) -> str:
    """Rename a parameter in all functions of a name, and the keyword in calls of these."""
    if not re.search(rf"\b{name}\(", text) or word not in text:
        return text
    lines = text.splitlines(keepends=True)
    for node in ast.walk(_tree(text)):
        defines = isinstance(node, ast.FunctionDef) and node.name == name
        if defines or (isinstance(node, ast.Call) and _last_name(node.func) == name):
            for number in range(node.lineno - 1, node.end_lineno):  # type: ignore[attr-defined]
                lines[number] = re.sub(rf"\b{word}\b", f"{word}_now", lines[number])
    return "".join(lines)


def _last_name(node: ast.expr) -> str:
    return str(getattr(node, "attr", getattr(node, "id", "")))


def _using(what: object) -> Callable[[Patch, frozenset[Any]], bool | None]:
    return lambda patch, used: True if what in used else None


def properties(text_of: _Texts, modules: Iterable[str], names: frozenset[str]) -> Iterator[Around]:
    """Every attribute that a wrapper sets and one class has: made a property without a setter.

    Args:
        text_of: returns a module's source.
        modules: the modules that are looked through.
        names: of attributes.
    """
    any_of = "|".join(sorted(names))
    sets = re.compile(rf"\bself\.(?:{any_of})\b[^\n]*=|^    (?:{any_of})\s*[:=]", re.MULTILINE)
    homes: dict[str, list[tuple[str, ast.ClassDef]]] = {}
    for home in modules:
        text = text_of(home) or ""
        for node in _tree(text).body if sets.search(text) else ():
            if isinstance(node, ast.ClassDef):
                for name in {attribute for each in ast.walk(node) for attribute in _defined(each)}:
                    if name in names:
                        homes.setdefault(name, []).append((home, node))
    for name, classes in sorted(homes.items()):
        for home, cls in classes if len(classes) == 1 else ():
            for kind, text in PROPERTIES.items():

                def change(
                    module: str, before: str, name: str = name, home: str = home,
                    cls: ast.ClassDef = cls, text: str = text,
                ) -> str:  # fmt: skip
                    if module != home:
                        return before
                    lines = before.splitlines(keepends=True)
                    own = slice(cls.lineno - 1, cls.end_lineno)
                    inner = "".join(lines[own])
                    inner = re.sub(rf"\bself\.{name}\b", f"self._{name}_now", inner)
                    inner = re.sub(
                        rf"^(    ){name}\b(?=\s*[:=])", rf"\1_{name}_now", inner, flags=re.M
                    )
                    lines[own] = [inner.rstrip("\n") + text.format(name=name)]
                    return "".join(lines)

                yield Around(kind, f"{home}:{cls.name}.{name}", change, _using(name))


PROPERTIES = {
    "property": """

    @property
    def {name}(self):
        return self._{name}_now

""",
    "property by a call": """

    {name} = property(lambda self: self._{name}_now)

""",
    "decorated property": """

    @functools.wraps(len)
    @property
    def {name}(self):
        return self._{name}_now

""",
}


def shapes(text_of: _Texts, modules: Iterable[str], names: frozenset[str]) -> Iterator[Around]:
    """Every function whose result a wrapper takes apart: it returns something else.

    Args:
        text_of: returns a module's source.
        modules: the modules that are looked through.
        names: of functions.
    """
    homes: dict[str, list[tuple[str, ast.FunctionDef]]] = {}
    for home in modules:
        text = text_of(home) or ""
        for node in ast.walk(_tree(text)) if any(f"def {n}(" in text for n in names) else ():
            if isinstance(node, ast.FunctionDef) and node.name in names and _results(node):
                homes.setdefault(node.name, []).append((home, node))
    for name, functions in sorted(homes.items()):
        for kind, form in SHAPES.items() if len(functions) <= 3 else ():

            def change(
                module: str, before: str, functions: Any = tuple(functions), form: str = form
            ) -> str:
                lines = before.splitlines(keepends=True)
                for node in [node for home, node in functions if home == module][::-1]:
                    last = _results(node)[-1]
                    said = form.format(ast.unparse(last.value))  # type: ignore[arg-type]
                    lines[last.lineno - 1 : last.end_lineno] = [
                        f"{' ' * last.col_offset}return {said}\n"
                    ]
                return "".join(lines)

            yield Around(kind, name, change, _using(name))


def _results(function: ast.FunctionDef) -> list[ast.Return]:
    return [n for n in _own(function) if isinstance(n, ast.Return) and n.value is not None]


SHAPES = {
    "items": "list({}.items())",
    "in a tuple": "({},)",
    "a list": "[*{}]",
    "by a name": "{{'result': {}}}",
}


def detours(targets: Sequence[Target]) -> Iterator[Around]:
    """Every wrapped function with what calls would go through instead, and right neighbours."""
    for target in {target.address: target for target in targets}.values():
        owner, _, name = target.qualname.rpartition(".")
        rights = {
            "used in a function": f"\n\ndef _fuzz_use():\n    return {{0: {owner or name}}}\n"
        }
        wrongs = {
            "table": f"\n\n_FUZZ = {{'x': {name}}}\n",
            "second name": f"\n\n_fuzz = {name}\n",
            "list": f"\n\n_FUZZ: list = [\n    {name},\n]\n",
        }
        if owner:
            head = f"\n\nclass _Fuzz({owner}):\n    def {name}(self, *args, **kwargs):\n        "
            rights["a subclass that calls it"] = f"{head}return super().{name}(*args, **kwargs)\n"
            rights["a subclass without it"] = f"\n\nclass _Fuzz({owner}):\n    pass\n"
            wrongs = {"a subclass that overrides it": f"{head}return None\n"}
            if name.startswith("__"):
                wrongs = {}
            else:
                yield _detour("a second name in the class", target, f"    _fuzz = {name}\n", True)
        for refused, changes in ((False, rights), (True, wrongs)):
            for kind, text in changes.items():
                yield _detour(kind, target, text, refused)


def _detour(kind: str, target: Target, added: str, refused: bool) -> Around:
    def change(module: str, text: str) -> str:
        if module != target.module:
            return text
        if not added.startswith(" "):
            return text + added
        node: ast.AST = ast.parse(text)
        for part in target.qualname.split("."):
            node = [n for n in ast.walk(node) if getattr(n, "name", None) == part][-1]
        lines = text.splitlines(keepends=True)
        lines.insert(node.end_lineno, added)  # type: ignore[attr-defined]
        return "".join(lines)

    def concerns(patch: Patch, used: frozenset[str]) -> bool | None:
        mine = target.address in [each.address for each in patch.targets]
        return refused if mine else None

    return Around(kind, target.address, change, concerns)
