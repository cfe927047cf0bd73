"""A person who pastes an error message into the site's search lands on its hazard."""

from __future__ import annotations

import contextlib
import functools
import http.server
import shutil
import threading
from pathlib import Path

import pytest

SITE = Path(__file__).parents[2] / "build" / "site"
BROWSER = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chrome"))), None)
sync_api = pytest.importorskip("playwright.sync_api", reason="`make test-docs` installs playwright")
pytestmark = [
    pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome is on PATH"),
    pytest.mark.skipif(not SITE.exists(), reason="`make docs` has built no site"),
]
#: A start without looking for updates, or for anybody else.
FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
]


@contextlib.contextmanager
def served():
    """Serve the site on a port of this machine; give its address."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            return

    handler = functools.partial(Quiet, directory=str(SITE))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as started:
        running = started.chromium.launch(executable_path=BROWSER, args=FLAGS)
        yield running
        running.close()


@pytest.fixture(scope="module")
def address():
    with served() as at:
        yield at


@pytest.mark.parametrize(
    ("message", "hazard"),
    [
        (
            "When overlap_grad_reduce is True, config.no_sync_func must be None",
            "no-sync-func-reentry",
        ),
        ("Inplace update to inference tensor outside InferenceMode", "aux-loss-scale-refused"),
        ("Should not have multiple communication calls outstanding", "gradients-never-reduced"),
        ("Inference tensors cannot be saved for backward", "rope-table-from-inference"),
    ],
)
def test_a_message_that_is_pasted_leads_to_its_hazard(browser, address, message, hazard):
    page = browser.new_page()
    page.goto(address)
    page.locator("input.md-search__input").click()
    page.keyboard.insert_text(message)
    page.keyboard.press("End")  # the search waits for a key, as that of a paste
    found = page.locator("a.md-search-result__link")
    found.first.wait_for(timeout=20_000)
    places = [each.get_attribute("href") for each in found.all()]
    assert f"/hazards/{hazard}/" in places[0], places
    found.first.click()
    page.wait_for_url(f"**/hazards/{hazard}/**")
    assert page.locator("h1").inner_text().startswith(hazard)
    page.close()


def test_the_matrix_shows_what_a_chosen_megatron_has(browser, address):
    page = browser.new_page()
    page.goto(f"{address}/matrix/")
    rows = page.locator(".matrix tbody tr:visible")
    everything = rows.count()
    page.select_option("#megatron", "0.12.3")
    shown = [row.locator("th").inner_text() for row in rows.all()]
    assert 10 < len(shown) < everything
    assert "mtp-gradient-times-tp" in shown
    assert "mtp-without-transformer-engine" not in shown
    page.close()


def columns(page):
    """The Megatrons whose columns are seen."""
    return [head.inner_text() for head in page.locator(".matrix thead th:visible").all()][1:]


def offered(page):
    """The Megatrons that can be chosen."""
    return page.eval_on_selector_all(
        "#megatron option:not([disabled])", "found => found.slice(1).map(each => each.value)"
    )


def test_the_matrix_shows_what_the_megatrons_of_a_chosen_framework_have(browser, address):
    page = browser.new_page()
    page.goto(f"{address}/matrix/")
    rows = page.locator(".matrix tbody tr:visible")
    everything = rows.count()
    megatrons = columns(page)
    page.select_option("#framework", label="verl images, and the one with TensorRT-LLM")
    assert columns(page) == offered(page) == ["0.18.2", "verl"]
    of_both = [row.locator("th").inner_text() for row in rows.all()]
    assert 10 < len(of_both) < everything
    # A hazard of 0.12 alone, which verl does not pin.
    assert "mtp-gradient-times-tp" not in of_both
    note = page.locator("[data-framework]:visible")
    assert note.locator("a").all_inner_texts() == ["verl-wiring-reentry"]

    page.select_option("#megatron", "verl")
    assert columns(page) == ["verl"]
    here = page.locator(".matrix tbody tr:visible td.here:visible")
    assert rows.count() == here.count() < len(of_both)

    # Another framework pins another Megatron: the choice of verl's is gone.
    page.select_option("#framework", label="slime main of 2026-08-21, image")
    assert columns(page) == ["slime"]
    assert page.input_value("#megatron") == ""
    page.select_option("#framework", "")
    assert (rows.count(), columns(page)) == (everything, megatrons)
    assert page.locator("[data-framework]:visible").count() == 0
    page.close()


@pytest.mark.parametrize("width", [390, 1440])
@pytest.mark.parametrize(
    "path",
    [
        *("", "concepts/", "supported-models/", "benchmarks/", "train-step/packs/"),
        *("hazards/", "hazards/no-sync-func-reentry/", "matrix/", "api/step/"),
        *("environment/", "troubleshooting/", "train-step/failures/"),
    ],
)
def test_no_page_is_wider_than_its_screen(browser, address, path, width):
    page = browser.new_page(viewport={"width": width, "height": 900})
    page.goto(f"{address}/{path}")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.close()
