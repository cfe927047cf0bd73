"""Finds secrets in the URL of a store, and parses the URL's location."""

from __future__ import annotations

import itertools
import os
import re
import urllib.parse

# A user with a password, which may contain an unquoted slash. A colon before a port or before the
# next URL of a chain does not begin a password. Over HTTP a user alone may be a token; elsewhere it
# is not a secret, as in abfs://container@account.
_USER = re.compile(
    r"(?is)(?<=://)[^/?:]*:(?:[^/?]*|(?!:|\d{1,5}[/?]).*)@|(?:(?<=http://)|(?<=https://))[^/?]*@"
)


def split_secrets(url: str) -> tuple[str, set[str]]:
    """Return a store's URL without passwords and query, and the set of secrets that were in the
    removed parts. A path has no secrets.
    """
    plain, _, query = _USER.sub("", url).partition("?") if "://" in url else (url, "", "")
    secrets = {query, *itertools.chain(*urllib.parse.parse_qs(query).values())}
    for user in _USER.findall(url):
        # A store that splits the URL at a slash may show a part of the password.
        secrets.update([user[:-1].partition(":")[2], *re.split("[:/@?]", user)])
    return plain, secrets - {""}


SCHEMES = frozenset({"file", "s3", "gs", "az", "abfs", "hf"})
"""Allowed schemes; a path has the scheme file. Other schemes of fsspec may run code."""


def place_of(url: str) -> tuple[str, ...]:
    """Return the location of a store as a tuple: the scheme of its URL ("file" for a path), then
    the names between the slashes, such as the bucket and its folders.

    Raises:
        ValueError: the scheme is not allowed, or the URL has parts that a file system may
            interpret, such as a query. The message shows no secrets.
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
            f"{split_secrets(url)[0]!r} is not the location of a store; give a path, or a URL of "
            f"{', '.join(sorted(SCHEMES))} without ::, .., a query or a percent sign"
        )
    return scheme, *parts


def refuse_secrets(subject: str, url: str, remedy: str) -> None:
    """Raise `ValueError` if a URL has a password or a query; the message does not show the URL."""
    if split_secrets(url)[1]:
        raise ValueError(f"{subject} has a password or a query, not shown here; {remedy}")
