"""Finds what is secret in a URL of a store, and the place that it names, if it is nothing else."""

from __future__ import annotations

import itertools
import os
import re
import urllib.parse

# A user with a password, which may hold a slash that nobody quoted; a colon before a port or the
# next URL of a chain begins none. Over HTTP a user alone may be a token; elsewhere it is no secret,
# as in abfs://container@account.
_USER = re.compile(
    r"(?is)(?<=://)[^/?:]*:(?:[^/?]*|(?!:|\d{1,5}[/?]).*)@|(?:(?<=http://)|(?<=https://))[^/?]*@"
)


def split_secrets(url: str) -> tuple[str, set[str]]:
    """Return a URL without its passwords and query, and the texts in these; a path has none."""
    plain, _, query = _USER.sub("", url).partition("?") if "://" in url else (url, "", "")
    secrets = {query, *itertools.chain(*urllib.parse.parse_qs(query).values())}
    for user in _USER.findall(url):
        # A store that cuts the URL at a slash shows a part of the password.
        secrets.update([user[:-1].partition(":")[2], *re.split("[:/@?]", user)])
    return plain, secrets - {""}


SCHEMES = frozenset({"file", "s3", "gs", "az", "abfs", "hf"})
"""Schemes of stores that are opened; a path is of the first. Others of fsspec may run code."""


def place_of(url: str) -> tuple[str, ...]:
    """Return the scheme of a store's URL, or of a path, and the folders down to its place.

    Errors: `ValueError`, which shows no secret, for another scheme, and for a URL that a file
        system may take for more than a place.
    """
    scheme, is_url, path = (_USER.sub("", url) if "://" in url else url).partition("://")
    if not is_url:
        scheme, path = "file", os.path.expanduser(url)
    parts = path.rstrip("/").split("/")
    if scheme == "file":
        parts = [part for part in os.path.abspath(path).split("/") if part]
    odd = scheme != "file" and (set("?#%\\").intersection(path) or {"", ".", ".."} & set(parts))
    if scheme not in SCHEMES or odd or "::" in url or not url.isprintable():
        raise ValueError(
            f"{split_secrets(url)[0]!r} is no place of a store; give a path, or a URL of "
            f"{', '.join(sorted(SCHEMES))} without ::, .., a query or a percent sign"
        )
    return scheme, *parts


def refuse_secrets(what: str, url: str, remedy: str) -> None:
    """Raise `ValueError`, which does not show the URL, if there is a secret in it."""
    if split_secrets(url)[1]:
        raise ValueError(f"{what} has a password or a query, not shown here; {remedy}")
