"""Patches live objects: record → decide → install → report.

`record` and `source` import none of the others; `catalog` finds the case files; `contract`
compares a body with a wrapper; `decide` judges a patch by version and bodies; `patch_points`
changes live objects; `install` holds the state and the lock; `import_hooks` waits for imports;
users call `api` and `verify`. Nothing here imports torch or Megatron. Code that `apply()` runs
before Megatron is imported takes nothing from the standard library that a bare interpreter has not
loaded.
"""

from megatron_idempotent.lazy import attributes

__getattr__, __dir__ = attributes(__name__)
