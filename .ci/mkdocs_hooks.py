"""Lets MkDocs take generated pages and their navigation, and move links: `tools/site_pages.py`."""

import sys
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))
import site_pages  # noqa: E402


def on_config(config):
    hazards = next(each["Hazards"] for each in config.nav if "Hazards" in each)
    hazards.extend(site_pages.hazard_nav())
    return config


def on_files(files, config):
    for path, markdown in site_pages.pages(ROOT).items():
        files.append(File.generated(config, path, content=markdown))
    return files


def on_page_markdown(markdown, *, page, config, files):
    def known(path):
        return files.get_file_from_path(path) is not None

    return site_pages.relinked(markdown, page.file.src_uri, known, config.repo_url.rstrip("/"))
