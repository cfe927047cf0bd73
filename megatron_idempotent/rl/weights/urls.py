"""Finds what is secret in a URL: a password before the host, and the query, which may sign it."""

from __future__ import annotations

import itertools
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


def refuse_secrets(what: str, url: str, remedy: str) -> None:
    """Raise `ValueError`, which does not show the URL, if there is a secret in it."""
    if split_secrets(url)[1]:
        raise ValueError(f"{what} has a password or a query, not shown here; {remedy}")
