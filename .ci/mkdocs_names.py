"""Makes links to the reference of the package's names in guides, where they stand as code.

`docs/api/` lists what has an entry, one line `::: path.of.object` each. A class, or a function
whose name has an underscore or that stands with its brackets, becomes a link; mkdocs-autorefs finds
its page, and the build is strict where there is none.
"""

import re
from pathlib import Path

API = Path(__file__).parents[1] / "docs" / "api"
PATHS = re.findall(
    r"^::: (\S+)$", "\n".join(page.read_text("utf-8") for page in API.glob("*.md")), re.MULTILINE
)
ENTRIES = {path.rpartition(".")[2]: path for path in PATHS}
#: Others have these too, and pages mean theirs.
ELSEWHERE = {"arguments", "run", "start", "train"}
#: A link, a heading or a block of code, which stay as they are; or the code of a name.
PART = re.compile(r"<(a|h\d|pre)\b.*?</\1>|<code>((?:\w+\.)*(\w+)(\([^<]*\))?)</code>", re.DOTALL)


def linked(found: re.Match[str]) -> str:
    name = found[3] or ""
    clear = name[:1].isupper() or "_" in name or (found[4] and name not in ELSEWHERE)
    # `gc.enable()` is not ours: what stands before a name has to be in its path.
    ours = name in ENTRIES and {*found[2].split("(")[0].split(".")} <= {*ENTRIES[name].split(".")}
    if not (clear and ours):
        return found[0]
    return f'<autoref identifier="{ENTRIES[name]}">{found[0]}</autoref>'


def on_page_content(html, *, page, config, files):
    if not page.file.src_uri.startswith("api/"):
        return PART.sub(linked, html)
    page.meta["search"] = {"boost": 0.5}  # a search finds the guide of the same title first
    return html
