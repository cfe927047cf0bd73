"""Applies the patches by being imported, for doors that load a module and call nothing.

In a process that has imported Megatron or a framework the patches are applied at once. In any other
one a finder waits for that import, and nothing else of this package is loaded.
"""

from .hook import watch

watch()
