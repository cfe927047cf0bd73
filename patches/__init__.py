"""Holds the case files, one hazard of the train path per file, which `catalog` finds by name.

Each module's docstring is its case file (Symptom, Cause, Affects, Upstream, Remove when); below it
stand the wrappers, the reproduction and one `PATCH`, `HELPER` or `LIMIT`. Adding a patch is adding
a file.
"""

if __name__ != "megatron_idempotent.patches":
    raise ImportError(
        f"{__name__!r} is the source folder of megatron_idempotent.patches and must not be "
        "imported under another name: a second copy of a patch would not know of the first. "
        "Install the project and import megatron_idempotent.patches"
    )
