"""Applies the patches by being imported, for doors that load a module and call nothing.

If the process has imported Megatron or a framework, the patches are applied at once. Otherwise a
finder waits for that import, and nothing else of this package is loaded.
"""

from .hook import watch

watch()
