"""Runs at the start of each Python below `megatron-idempotent run`, which puts this folder first.

Python imports one module of this name. So this one watches for Megatron, steps aside, and imports
the one that it hides.
"""

import importlib
import os
import sys

try:
    import megatron_idempotent.auto  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "megatron_idempotent":
        raise
    # An interpreter of another environment, such as a tool that the command calls: said once.
    _told = f"{os.environ.get('MEGATRON_IDEMPOTENT_RUN', '')}/without{sys.prefix.replace('/', '-')}"
    if not os.path.exists(_told):
        print(
            f"megatron-idempotent: not installed in {sys.prefix}, so what {sys.executable} runs "
            "goes without patches",
            file=sys.stderr,
        )
        if os.path.isdir(os.path.dirname(_told)):
            open(_told, "w").close()

_here = os.path.dirname(os.path.abspath(__file__))
_path = sys.path[:]
sys.path[:] = [each for each in _path if os.path.abspath(each or os.curdir) != _here]
_mine = sys.modules.pop("sitecustomize", None)
try:
    importlib.import_module("sitecustomize")
except ModuleNotFoundError as error:
    if error.name != "sitecustomize":
        raise
    if _mine is not None:
        sys.modules["sitecustomize"] = _mine
finally:
    # What the other one has put on the path stays.
    sys.path[:] = [each for each in _path if each not in sys.path] + sys.path
