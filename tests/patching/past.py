"""Additive changes of a program: what goes past a patched function, and what only looks so.

Each is some statements of a module `toy_user`, in which `held` is upstream's function, `Up` the
class that has it, and GREET the method's name.
"""

from __future__ import annotations

import sys
import types

THING = "class Thing:\n    pass\n"
MAKE = "def make(call):\n    def inner(x):\n        return call(x)\n    return inner\n"
#: Statements of a module that hold a function in `held`, by what names the place.
HOLDERS = {
    "toy_user.name": "name = held",
    "toy_user.TABLE": "TABLE = {'a': {'b': [(held,)]}}",
    "toy_user.KEYS": "KEYS = {held: 'a'}",
    "toy_user.NAMES": "NAMES = frozenset([held])",
    "toy_user.QUEUE": "QUEUE = collections.deque([held])",
    "toy_user.PROXY": "PROXY = types.MappingProxyType({'a': held})",
    "toy_user.Other.fast": "class Other:\n    fast = held",
    "toy_user.Other.still": "class Other:\n    still = staticmethod(held)",
    "toy_user.Other.size": "class Other:\n    size = property(held)",
    "toy_user.Other.later": "class Other:\n    later = functools.partialmethod(held)",
    "toy_user.Other.Inner.fast": "class Other:\n    class Inner:\n        fast = held",
    "toy_user.default": "def default(x, call=held):\n    return call(x)",
    "toy_user.keyword": "def keyword(x, *, call=held):\n    return call(x)",
    "toy_user.Other.call": "class Other:\n    def call(self, call=held):\n        return call",
    "toy_user.closure": f"{MAKE}closure = make(held)",
    "toy_user.bound": "bound = types.MethodType(held, 3)",
    "toy_user.partial": "partial = functools.partial(held, 3)",
    "toy_user.faster": "faster = functools.lru_cache(held)",
    "toy_user.thing": f"{THING}thing = Thing()\nthing.call = held",
    "attribute `call` of an object of toy_user.Thing": (
        f"{THING}THINGS = [Thing()]\nTHINGS[0].call = held"
    ),
    "toy_user.make.<locals>.inner": f"{MAKE}{THING}THINGS = [Thing()]\nTHINGS[0].f = make(held)",
    "toy_user.waiting": (
        "def wait(call):\n    yield\n    call()\nwaiting = wait(held)\nnext(waiting)"
    ),
}

if sys.version_info < (3, 11):  # the variables of a generator are those of a frame
    del HOLDERS["toy_user.waiting"]

#: Classes by what names the one that overrides; empty if all is well.
CLASSES = {
    "toy_user.Rude overrides it": "class Rude(Up):\n    def GREET(self, name): ...",
    "toy_user.Low overrides it": ("class Heir(Up):\n    pass\nclass Low(Heir):\n    GREET = None"),
    "toy_user.Mixin, which comes before it in toy_user.Heir, overrides it": (
        "class Mixin:\n    def GREET(self, name): ...\nclass Heir(Mixin, Up):\n    pass\n"
        "class Low(Heir):\n    pass"
    ),
    "toy_user.Second, which comes before it in toy_user.Heir, overrides it": (
        "class First:\n    def GREET(self, name):\n        return super().GREET(name)\n"
        "class Second:\n    def GREET(self, name): ...\n"
        "class Heir(First, Second, Up):\n    pass"
    ),
    "toy_user.Far, which comes before it in toy_user.Heir, overrides it": (
        "class Far:\n    def GREET(self, name): ...\nclass Mixin(Far):\n    pass\n"
        "class Heir(Mixin, Up):\n    pass"
    ),
    "toy_user.Mixin, which comes before it in toy_user.Low, overrides it": (
        "class Mixin:\n    GREET = staticmethod(print)\n"
        "class Heir(Up):\n    def GREET(self, name):\n        return super().GREET(name)\n"
        "class Low(Mixin, Heir):\n    pass"
    ),
}
RIGHT = {
    "a mixin that calls the next": (
        "class Mixin:\n    def GREET(self, name):\n        return super().GREET(name)\n"
        "class Heir(Mixin, Up):\n    pass"
    ),
    "a mixin that comes later": (
        "class Mixin:\n    def GREET(self, name): ...\nclass Heir(Up, Mixin):\n    pass"
    ),
    "a diamond": ("class Left(Up.__base__):\n    pass\nclass Heir(Left, Up):\n    pass"),
    "a replacement that wears the function's name": (
        "@functools.wraps(Up.GREET)\ndef GREET(self, name): ..."
    ),
    "a decorated method that calls the next": (
        "class Heir(Up):\n    @functools.wraps(Up.GREET)\n"
        "    def GREET(self, name):\n        return Up.GREET(self, name)"
    ),
}


def run(source: str, module: types.ModuleType, held: object, owner: object, name: str) -> None:
    """Run the statements in a module, which forgets the function's name afterwards."""
    vars(module).update(held=held, Up=owner)
    text = f"import collections, functools, types\n{source}\ndel held, Up".replace("GREET", name)
    exec(text, vars(module))
