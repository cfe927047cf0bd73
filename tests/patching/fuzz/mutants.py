"""Changed sources of a function, and of what is around it, as a later release might have them.

Every operator goes through its sites in order, so that a seed chooses the same mutants on every
machine. A mutant's source is made when it is asked for.
"""

from __future__ import annotations

import ast
import copy
import random
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from megatron_idempotent.patching import Patch, Target

Definition = ast.FunctionDef
#: Changes a copy of the function in place, or returns the source by itself.
Change = Callable[[Definition], "str | None"]
Sites = Iterator[tuple[str, Change]]
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
    "gc-stays-off": ("train", "getattr(gc, 'enable')()", _LAST),
    "grad-scale-func": (
        "get_megatron_optimizer",
        "vars(get_model_config(model_chunks[0])).update(grad_scale_func=optimizers[0].scale_loss)",
        "return ChainedOptimizer(optimizers)",
    ),
    "no-sync-func-reentry": ("train", "setattr(config, 'no_sync_func', None)", _LAST),
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
        Mutant(tree.name, operator.__name__.strip("_"), site, tree, change)
        for operator in OPERATORS
        for site, change in operator(tree)
    ]


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


# The signature.


def _rename_parameter(tree: Definition) -> Sites:
    for name in _parameters(tree):

        def change(tree: Definition, name: str = name) -> None:
            for node in ast.walk(tree):
                if isinstance(node, ast.arg) and node.arg == name:
                    node.arg = f"{name}_now"
                elif isinstance(node, ast.Name) and node.id == name:
                    node.id = f"{name}_now"

        yield name, change


def _parameter_from_kwargs(tree: Definition) -> Sites:
    for name in _parameters(tree):

        def change(tree: Definition, name: str = name) -> None:
            _take_out(tree.args, name)
            tree.args.kwarg = tree.args.kwarg or ast.arg("others")
            _insert(tree, f"{name} = {tree.args.kwarg.arg}.pop({name!r}, None)")

        yield name, change


def _parameter_is_copied(tree: Definition) -> Sites:
    # Same name in the signature, another thing in the body.
    for name in _parameters(tree):
        yield name, _inserting(f"{name} = __import__('copy').copy({name})")


def _alias_of_parameter(tree: Definition) -> Sites:
    for name in _parameters(tree):

        def change(tree: Definition, name: str = name) -> None:
            for node in ast.walk(tree):
                if isinstance(node, ast.Name) and node.id == name:
                    node.id = f"{name}_here"
            _insert(tree, f"{name}_here = {name}")

        yield name, change


def _add_parameter(tree: Definition) -> Sites:
    def first(tree: Definition) -> None:
        tree.args.args.insert(0, ast.arg("fuzz"))
        tree.args.defaults = [ast.Constant(None)] * len(tree.args.args)

    def last(tree: Definition) -> None:
        tree.args.args.append(ast.arg("fuzz"))
        tree.args.defaults.append(ast.Constant(None))

    def keyword(tree: Definition) -> None:
        tree.args.kwonlyargs.append(ast.arg("fuzz"))
        tree.args.kw_defaults.append(ast.Constant(None))

    yield from (("first", first), ("last", last), ("keyword", keyword))


def _swap_parameters(tree: Definition) -> Sites:
    for index in range(len(tree.args.args) - 1):

        def change(tree: Definition, index: int = index) -> None:
            both = tree.args.args
            both[index], both[index + 1] = both[index + 1], both[index]

        yield f"{index} and {index + 1}", change


def _change_default(tree: Definition) -> Sites:
    for index, argument in enumerate(tree.args.args):

        def change(tree: Definition, index: int = index) -> None:
            arguments = tree.args
            start = len(arguments.args) - len(arguments.defaults)
            if index < start:  # it may be left out, and so may all after it
                arguments.defaults[:0] = [ast.Constant(None)] * (start - index)
                return
            default = arguments.defaults[index - start]
            value = default.value if isinstance(default, ast.Constant) else None
            new = not value if isinstance(value, bool) else None if value else 1
            arguments.defaults[index - start] = ast.Constant(new)

        yield argument.arg, change


def _no_default(tree: Definition) -> Sites:
    def change(tree: Definition) -> None:
        tree.args.defaults = []

    yield "all", change


def _keyword_only(tree: Definition) -> Sites:
    for index, argument in enumerate(tree.args.args):

        def change(tree: Definition, index: int = index) -> None:
            arguments = tree.args
            missing = len(arguments.args) - len(arguments.defaults)
            defaults = [*[None] * missing, *arguments.defaults]
            arguments.kwonlyargs[:0] = arguments.args[index:]
            arguments.kw_defaults[:0] = defaults[index:]
            arguments.args = arguments.args[:index]
            arguments.defaults = [d for d in defaults[:index] if d is not None]

        yield f"from {argument.arg} on", change


def _positional_only(tree: Definition) -> Sites:
    def change(tree: Definition) -> None:
        tree.args.posonlyargs, tree.args.args = tree.args.args, []

    yield "all", change


def _any_arguments(tree: Definition) -> Sites:
    call = "    return _fuzz_inner(*args, **kwargs)\n"

    def beside(tree: Definition) -> str:
        name, tree.name = tree.name, "_fuzz_inner"
        return f"{ast.unparse(tree)}\n\ndef {name}(*args, **kwargs):\n{call}"

    def inside(tree: Definition) -> str:
        name, tree.name = tree.name, "_fuzz_inner"
        return f"def {name}(*args, **kwargs):\n{textwrap.indent(ast.unparse(tree), '    ')}\n{call}"

    yield from (("beside", beside), ("inside", inside))


# What kind of function it is.


def _another_kind(tree: Definition) -> Sites:
    def asynchronous(tree: Definition) -> str:
        return f"async {ast.unparse(tree)}"

    yield "async", asynchronous
    yield "generator", _inserting("yield")
    yield "generator that yields nothing", _inserting("yield from ()")


def _decorated(tree: Definition) -> Sites:
    def under(*decorators: str) -> Change:
        above = "".join(f"@{decorator}\n" for decorator in decorators)
        return lambda tree: f"{_DECORATORS}{above}{ast.unparse(tree)}"

    yield "staticmethod", under("staticmethod")
    yield "with wraps", under("_fuzz_polite")
    yield "without wraps", under("_fuzz_rude")
    yield "both", under("_fuzz_polite", "_fuzz_rude")
    yield "lambda", under("(lambda f: lambda *a, **k: f(*a, **k))")
    yield "partial", under("(lambda f: __import__('functools').partial(f))")
    yield (
        "result in a tuple",
        under("(lambda f: __import__('functools').wraps(f)(lambda *a, **k: (f(*a, **k),)))"),
    )
    yield (
        "context manager",
        under("__import__('contextlib').nullcontext().__class__ and _fuzz_rude"),
    )
    yield "no_grad", under("__import__('torch').no_grad()")


def _another_function(tree: Definition) -> Sites:
    # What stands there at run time is not the definition that one reads.
    def beside(template: str) -> Change:
        def change(tree: Definition) -> str:
            name, text = tree.name, ast.unparse(tree)
            other = copy.deepcopy(tree)
            other.name = "_fuzz_other"
            return template.format(
                name=name,
                text=text,
                indented=textwrap.indent(text, "    "),
                other=ast.unparse(other),
            )

        return change

    yield "a lambda", beside("{text}\n_fuzz = {name}\n{name} = lambda *a, **k: _fuzz(*a, **k)\n")
    yield "another def", beside("{text}\n\n{other}\n{name} = _fuzz_other\n")
    yield "a dead copy behind", beside("{text}\n\nif False:\n{indented}\n")
    yield "a dead copy before", beside("if False:\n{indented}\n\n{other}\n{name} = _fuzz_other\n")
    yield "wrapped behind", beside(_DECORATORS + "{text}\n{name} = _fuzz_polite({name})\n")


# What it returns.


def _another_result(tree: Definition) -> Sites:
    def items(change: Callable[[list[ast.expr]], list[ast.expr]]) -> _ToResult:
        return lambda value: (
            ast.Tuple(change(value.elts), ast.Load()) if isinstance(value, ast.Tuple) else None
        )

    def display(value: ast.expr) -> ast.expr | None:
        if not isinstance(value, ast.Tuple):
            return None
        return ast.Dict([ast.Constant(f"item{i}") for i in range(len(value.elts))], value.elts)

    def named(value: ast.expr) -> ast.expr:
        parts = value.elts if isinstance(value, ast.Tuple) else [value]
        names = " ".join(f"item{index}" for index in range(len(parts)))
        maker = f"__import__('collections').namedtuple('Result', {names!r})"
        return ast.Call(ast.parse(maker, mode="eval").body, parts, [])

    def called(name: str) -> _ToResult:
        return lambda value: ast.Call(ast.Name(name, ast.Load()), [value], [])

    changes: dict[str, _ToResult] = {
        "one item more": items(lambda v: [*v, ast.Constant(None)]),
        "one item more in front": items(lambda v: [ast.Constant(0), *v]),
        "one item less": items(lambda v: v[:-1]),
        "first item less": items(lambda v: v[1:]),
        "two items swapped": items(lambda v: [v[1], v[0], *v[2:]]),
        "all items swapped": items(lambda v: v[::-1]),
        "fourth item moved": items(lambda v: [*v[:3], *v[4:], *v[3:4]]),
        "dict": display,
        "named tuple": named,
        "list": lambda v: ast.List(v.elts, ast.Load()) if isinstance(v, ast.Tuple) else None,
        "list of it": lambda v: ast.List([v], ast.Load()),
        "with something": lambda v: ast.Tuple([v, ast.Constant(None)], ast.Load()),
        "iterator": lambda v: called("iter")(v) if isinstance(v, ast.Tuple) else None,
        "text": called("repr"),
        "nothing": lambda v: ast.Constant(None),
    }
    for name, change in changes.items():
        yield name, _returning(change, None)
    count = sum(isinstance(node, ast.Return) for node in _own(tree))
    for index in range(count if count > 1 else 0):
        yield f"one item more in return {index}", _returning(changes["one item more"], index)
        yield f"nothing in return {index}", _returning(changes["nothing"], index)


_ToResult = Callable[[ast.expr], "ast.expr | None"]


def _returning(change: _ToResult, only: int | None) -> Change:
    def changed(tree: Definition) -> str | None:
        returns = [node for node in _own(tree) if isinstance(node, ast.Return) and node.value]
        done = False
        for index, node in enumerate(returns):
            new = change(node.value) if node.value and only in (None, index) else None
            if new is not None:
                node.value, done = new, True
        return None if done else "not a program"

    return changed


# The statements.


def _delete(tree: Definition) -> Sites:
    for path, statement in _statements(tree):
        yield _label(statement), _replacing(path, lambda s: [ast.Pass()])


def _duplicate(tree: Definition) -> Sites:
    for path, statement in _statements(tree):
        if not isinstance(statement, (ast.Return, ast.FunctionDef)):
            yield _label(statement), _replacing(path, lambda s: [s, copy.deepcopy(s)])


def _move_down(tree: Definition) -> Sites:
    for path, statement in _statements(tree):

        def change(tree: Definition, path: Path = path) -> str | None:
            block, index = _block(tree, path)
            if index + 1 == len(block):
                return "not a program"
            block[index], block[index + 1] = block[index + 1], block[index]
            return None

        yield _label(statement), change


def _move_to_the_end(tree: Definition) -> Sites:
    for path, statement in _statements(tree):

        def change(tree: Definition, path: Path = path) -> str | None:
            block, index = _block(tree, path)
            if index + 2 >= len(block):
                return "not a program"
            block.insert(len(block) - 2, block.pop(index))
            return None

        yield _label(statement), change


def _move_to_the_front(tree: Definition) -> Sites:
    for path, statement in _statements(tree):

        def change(tree: Definition, path: Path = path) -> str | None:
            block, index = _block(tree, path)
            tree.body.insert(1, block.pop(index))
            if not block:
                block.append(ast.Pass())
            return None

        yield _label(statement), change


def _make_conditional(tree: Definition) -> Sites:
    for path, statement in _statements(tree):
        for test in ("not __debug__", "'FUZZ' not in __import__('os').environ"):
            parsed = ast.parse(test, mode="eval").body

            def under(s: ast.stmt, parsed: ast.expr = parsed) -> list[ast.stmt]:
                return [ast.If(parsed, [s], [])]

            yield f"{test}: {_label(statement)}", _replacing(path, under)


def _make_unconditional(tree: Definition) -> Sites:
    for path, statement in _statements(tree):
        if isinstance(statement, ast.If):
            yield _label(statement), _replacing(path, lambda s: s.body)


def _negate(tree: Definition) -> Sites:
    yield from _tests(tree, lambda test: ast.UnaryOp(ast.Not(), test))


def _weaken(tree: Definition) -> Sites:
    yield from _tests(tree, lambda test: ast.BoolOp(ast.Or(), [test, ast.Constant(True)]))


def _strengthen(tree: Definition) -> Sites:
    yield from _tests(tree, lambda test: ast.BoolOp(ast.And(), [test, ast.Constant(False)]))


def _protect(tree: Definition) -> Sites:
    def tried(s: ast.stmt) -> list[ast.stmt]:
        handler = ast.ExceptHandler(ast.Name("Exception", ast.Load()), None, [ast.Pass()])
        return [ast.Try([s], [handler], [], [])]

    for path, statement in _statements(tree):
        if not isinstance(statement, (ast.Return, ast.FunctionDef)):
            yield _label(statement), _replacing(path, tried)


def _return_early(tree: Definition) -> Sites:
    last = tree.body[-1]
    value = last.value if isinstance(last, ast.Return) else None
    for path, statement in _statements(tree):
        if len(path) == 2:

            def change(s: ast.stmt) -> list[ast.stmt]:
                return [ast.Return(copy.deepcopy(value)), s]

            yield _label(statement), _replacing(path, change)
    if isinstance(value, ast.Tuple):
        yield "at once", _inserting(f"return {', '.join('0' * len(value.elts))}")


def _outline(tree: Definition) -> Sites:
    # A statement becomes a function in the function, called where it stood.
    for path, statement in _statements(tree):
        leaves = (ast.Return, ast.Break, ast.Continue, ast.Yield, ast.FunctionDef)
        if any(isinstance(node, leaves) for node in ast.walk(statement)):
            continue

        def change(s: ast.stmt) -> list[ast.stmt]:
            names = {
                node.id
                for node in ast.walk(s)
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
            }
            helper, call = ast.parse("def _fuzz_part():\n    pass\n_fuzz_part()").body
            assert isinstance(helper, ast.FunctionDef)
            helper.body = [*([ast.Nonlocal(sorted(names))] if names else []), s]
            return [helper, call]

        # A name that only this statement binds has to be bound outside for `nonlocal`.
        stored = sorted(
            node.id
            for node in ast.walk(statement)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        )

        def outlined(tree: Definition, path: Path = path, stored: list[str] = stored) -> str | None:
            _replacing(path, change)(tree)
            known = set(_parameters(tree))
            for name in dict.fromkeys(stored):
                if name not in known:
                    _insert(tree, f"if not __debug__: {name} = None")
            return None

        yield _label(statement), outlined


def _in_a_with(tree: Definition) -> Sites:
    # All of it, with something around.
    def around(head: str) -> Change:
        def change(tree: Definition) -> None:
            (outer,) = ast.parse(f"{head}\n    pass").body
            outer.body = tree.body  # type: ignore[attr-defined]
            tree.body = [outer]

        return change

    yield "nullcontext", around("with __import__('contextlib').nullcontext():")
    yield "suppress", around("with __import__('contextlib').suppress(ValueError):")
    yield "while", around("while True:")
    yield "for", around("for _fuzz in range(1):")


def _repair(tree: Definition) -> Sites:
    for patch_id, (function, repair, before) in REPAIRS.items():
        places = [path for path, each in _statements(tree) if ast.unparse(each) == before]
        if tree.name == function and places:

            def change(s: ast.stmt, repair: str = repair) -> list[ast.stmt]:
                return [*ast.parse(repair).body, s]

            yield patch_id, _replacing(places[-1], change)


# The expressions.


def _change_constant(tree: Definition) -> Sites:
    def change(node: ast.AST) -> ast.expr | None:
        value = node.value if isinstance(node, ast.Constant) else ...
        if isinstance(value, bool) or value is None:
            return ast.Constant(not value)
        if isinstance(value, (int, float)):
            return ast.Constant(value + 1)
        return ast.Constant(f"{value}_now") if isinstance(value, str) else None

    yield from _expressions(tree, change)


def _rename_call(tree: Definition) -> Sites:
    def change(node: ast.AST) -> ast.expr | None:
        if not isinstance(node, ast.Call):
            return None
        if isinstance(node.func, ast.Attribute):
            node.func.attr += "_now"
        elif isinstance(node.func, ast.Name):
            node.func.id += "_now"
        return node

    yield from _expressions(tree, change)


def _stub_call(tree: Definition) -> Sites:
    yield from _expressions(
        tree, lambda node: ast.Constant(None) if isinstance(node, ast.Call) else None
    )


def _drop_argument(tree: Definition) -> Sites:
    def change(node: ast.AST) -> ast.expr | None:
        if not isinstance(node, ast.Call) or not (node.args or node.keywords):
            return None
        (node.keywords or node.args).pop()
        return node

    yield from _expressions(tree, change)


def _rename_attribute(tree: Definition) -> Sites:
    def change(node: ast.AST) -> ast.expr | None:
        if not isinstance(node, ast.Attribute):
            return None
        node.attr += "_now"
        return node

    yield from _expressions(tree, change)


def _ask_politely(tree: Definition) -> Sites:
    # The same in another spelling.
    def change(node: ast.AST) -> ast.expr | None:
        if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Load):
            return None
        name, missing = ast.Constant(node.attr), ast.Constant(None)
        return ast.Call(ast.Name("getattr", ast.Load()), [node.value, name, missing], [])

    yield from _expressions(tree, change)


def _set_politely(tree: Definition) -> Sites:
    def change(s: ast.stmt) -> list[ast.stmt]:
        assert isinstance(s, ast.Assign)
        (target,) = s.targets
        assert isinstance(target, ast.Attribute)
        arguments = [target.value, ast.Constant(target.attr), s.value]
        return [ast.Expr(ast.Call(ast.Name("setattr", ast.Load()), arguments, []))]

    for path, statement in _statements(tree):
        if (
            isinstance(statement, ast.Assign)
            and len(statement.targets) == 1
            and isinstance(statement.targets[0], ast.Attribute)
        ):
            yield _label(statement), _replacing(path, change)


OPERATORS: tuple[Callable[[Definition], Sites], ...] = (
    _rename_parameter,
    _parameter_from_kwargs,
    _parameter_is_copied,
    _alias_of_parameter,
    _add_parameter,
    _swap_parameters,
    _change_default,
    _no_default,
    _keyword_only,
    _positional_only,
    _any_arguments,
    _another_kind,
    _decorated,
    _another_function,
    _another_result,
    _delete,
    _duplicate,
    _move_down,
    _move_to_the_end,
    _move_to_the_front,
    _make_conditional,
    _make_unconditional,
    _negate,
    _weaken,
    _strengthen,
    _protect,
    _return_early,
    _outline,
    _in_a_with,
    _repair,
    _change_constant,
    _rename_call,
    _stub_call,
    _drop_argument,
    _rename_attribute,
    _ask_politely,
    _set_politely,
)


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


def _inserting(text: str) -> Change:
    return lambda tree: _insert(tree, text)


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


def _tests(tree: Definition, change: Callable[[ast.expr], ast.expr]) -> Sites:
    for path, statement in _statements(tree):
        if isinstance(statement, (ast.If, ast.While, ast.Assert)):

            def changed(tree: Definition, path: Path = path) -> None:
                found = _node(tree, path)
                found.test = change(found.test)  # type: ignore[attr-defined]

            yield _label(statement), changed


def _expressions(tree: Definition, change: Callable[[ast.AST], ast.expr | None]) -> Sites:
    def visit(node: ast.AST, path: Path) -> Iterator[tuple[Path, ast.expr]]:
        for name, value in ast.iter_fields(node):
            if isinstance(value, ast.expr):
                yield (*path, name), value
                yield from visit(value, (*path, name))
            elif isinstance(value, ast.AST):
                yield from visit(value, (*path, name))
            for index, item in enumerate(value if isinstance(value, list) else ()):
                if isinstance(item, ast.expr):
                    yield (*path, name, index), item
                if isinstance(item, ast.AST):
                    yield from visit(item, (*path, name, index))

    for path, expression in visit(tree, ()):
        if path[0] != "body" or change(copy.deepcopy(expression)) is None:
            continue

        def changed(tree: Definition, path: Path = path) -> None:
            new, holder, last = change(_node(tree, path)), _node(tree, path[:-1]), path[-1]  # type: ignore[arg-type]
            if isinstance(last, int):
                holder[last] = new  # type: ignore[index]
            else:
                setattr(holder, last, new)

        yield f"{ast.unparse(expression)[:60]} at {expression.lineno}", changed


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
            pattern = re.compile(rf"\b{name}\b")

            def change(module: str, text: str, pattern: re.Pattern[str] = pattern) -> str:
                return pattern.sub(lambda found: f"{found[0]}_now", text)

            def concerns(patch: Patch, used: frozenset[str], name: str = name) -> bool | None:
                return True if name in used else None

            yield Around("rename", name, change, concerns)


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
                keeps = any("megatron_idempotent" in name for name in used)
                return True if mine and keeps else None

            yield Around("slots", f"{home}:{owner}", change, concerns)


def detours(targets: Sequence[Target]) -> Iterator[Around]:
    """Every wrapped function with what calls would go through instead, and right neighbours."""
    for target in {target.address: target for target in targets}.values():
        owner, _, name = target.qualname.rpartition(".")
        rights = {
            "used in a function": f"\n\ndef _fuzz_use():\n    return {{0: {owner or name}}}\n",
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
