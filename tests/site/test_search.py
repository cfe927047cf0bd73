"""A person who pastes an error message into the site's search lands on its hazard."""

import contextlib
import functools
import http.server
import shutil
import threading
from pathlib import Path
from urllib.parse import urlsplit

import pytest

SITE = Path(__file__).parents[2] / "build" / "site"
BROWSER = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chrome"))), None)
sync_api = pytest.importorskip("playwright.sync_api", reason="`make test-docs` installs playwright")
pytestmark = [
    pytest.mark.full,
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


#: What users paste or type, by the hazard that has to be found first: an error message, a line of a
#: traceback, the title of a report, or words.
ASKED = {
    "no-sync-func-reentry": "AssertionError: When overlap_grad_reduce is True, "
    "config.no_sync_func must be None; a custom no_sync_func is not supported when overlapping",
    "forward-pre-hook-reentry": "    self.remove_forward_pre_hook_handles[module].remove()\n"
    "KeyError: GPTModel(\n  (embedding): LanguageModelEmbedding(",
    "rerun-state-after-exception": "UnboundLocalError: cannot access local variable "
    "'losses_reduced' where it is not associated with a value",
    "grad-scale-func": "MoE aux loss off by loss scale fp16",
    "aux-loss-scale-refused": "Inplace update to inference tensor outside InferenceMode",
    "rope-table-from-inference": "RuntimeError: Inference tensors cannot be saved for backward. To "
    "work around you can make a clone to get a normal tensor and use it in autograd.",
    "train-interval-timer": "timers('interval-time', log_level=0).start(barrier=True)\n"
    "AssertionError: timer has already been started",
    "expert-seed-collides": "Exception: seed 2725 already exists",
    "frozen-tied-embedding": "TypeError: Invalid function argument. Expected parameter `tensor` of "
    "type torch.Tensor but got <class 'NoneType'> instead.",
    "fsdp-v2-wedged-by-abort": "Invalid FSDP module phase transition: Phase.FORWARD -> "
    "Phase.FORWARD",
    "shared-embedding-in-two-buckets": "Param should not be in param_gbuf_map; each param only "
    "belongs to a single bucket.",
    "nemo-rl-method-not-undone": "ValueError: Timer 'train' is already running",
    "logits-always-built": "GPTModel.forward() got an unexpected keyword argument "
    "'output_processor'",
    "deferred-reduction-refused": "AssertionError: Communication call has not been issued for this "
    "bucket (0/5 params have grad available)",
    "first-window-aborted": "assert len(self.per_param_grad_ready_counts) == len(self.params)",
    "unstepped-optimizer-refused": "Traceback (most recent call last):\n"
    '  File "/opt/venv/lib/python3.12/site-packages/megatron/core/optimizer/distrib_optimizer.py", '
    "line 1532, in sharded_state_dict\n    state_dict = self.state_dict()\n"
    '  File "/opt/venv/lib/python3.12/site-packages/megatron/core/optimizer/distrib_optimizer.py", '
    "line 839, in state_dict\n    assert len(steps) == 1\n           ^^^^^^^^^^^^^^^\n"
    "AssertionError",
    "process-groups-leak": "Failed to bind NVLink SHARP (NVLS) Multicast memory of size 2097152 : "
    "CUDA error 2 'out of memory'",
    "nemo-rl-refit-before-gather": "fix(megatron): synchronize parameters before inference refit",
    "aux-loss-counts-own-tokens": "aux_loss and z_loss is incorrect when use "
    "calculate_per_token_loss and cp",
    "slime-train-reentry": "slime second rollout crashes with --overlap-grad-reduce",
    "zero-grad-while-offloaded": "segmentation fault in zero_grad_buffer after offloading",
    "gc-stays-off": "memory grows, garbage collection is off after train() with --manual-gc",
    "inference-rng-tracker-sticks": "same dropout masks on all tensor ranks after inference",
    "pipeline-abort": "pipeline hangs after one rank raises out of memory",
    "layerwise-gather-erases-gradients": "Muon: gradient norm 0.0 after a log-prob pass",
}


@pytest.fixture(scope="module")
def search(browser, address):
    """Return the places that the site's search finds for a text, the best first."""
    page = browser.new_page()
    page.goto(address)
    page.locator("input.md-search__input").click()

    def found(text):
        box = page.locator("input.md-search__input")
        box.fill("")
        page.keyboard.press("End")  # the search waits for a key, as that of a paste
        page.wait_for_function("() => !document.querySelector('.md-search-result__item')")
        page.keyboard.insert_text(text)
        page.keyboard.press("End")
        links = page.locator(".md-search-result__item > a.md-search-result__link")
        links.first.wait_for(timeout=20_000)
        return [urlsplit(each.get_attribute("href")).path for each in links.all()]

    yield found
    page.close()


@pytest.mark.parametrize(("hazard", "asked"), ASKED.items(), ids=[*ASKED])
def test_what_a_user_pastes_finds_its_hazard_first(search, hazard, asked):
    assert search(asked)[0] == f"/hazards/{hazard}/"


@pytest.mark.parametrize(
    ("asked", "page"),
    [
        *(("log-probs", "logprobs"), ("asynchronous controller", "async")),
        *(("install and apply", "use"), ("matrix", "matrix")),
    ],
)
def test_a_few_words_find_the_guide_that_has_them_for_a_title(search, asked, page):
    assert search(asked)[0] == f"/{page}/"


def test_a_hazard_has_its_tab_its_siblings_and_the_next_page(browser, address):
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    page.goto(f"{address}/hazards/train-interval-timer/")
    assert page.locator(".md-tabs__item--active").inner_text() == "Hazards"
    side = page.locator(".md-sidebar--primary .md-nav__link:visible")
    assert "gc-stays-off" in [each.inner_text().strip() for each in side.all()]
    page.locator(".md-footer__link--next").click()
    page.wait_for_url("**/hazards/train-iteration-lost/**")
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


def test_an_old_anchor_of_the_list_leads_to_the_row_of_the_hazard(browser, address):
    page = browser.new_page(viewport={"width": 390, "height": 900})
    page.goto(f"{address}/hazards/#zero-grad-while-offloaded")
    link = page.locator("td a[href$='zero-grad-while-offloaded/']")
    link.wait_for()
    page.wait_for_function("() => window.scrollY > 1000")
    box = link.bounding_box()
    assert 0 <= box["y"] < 900
    link.click()
    page.wait_for_url("**/hazards/zero-grad-while-offloaded/")
    page.close()


def test_a_benchmark_folds_its_picture_and_its_numbers(browser, address):
    page = browser.new_page()
    page.goto(f"{address}/benchmarks/")
    own = page.locator("details", has=page.locator("img[src$='benchmarks/patched_step.svg']"))
    own.wait_for()
    numbers, picture = own.locator("table").first, own.locator("img")
    assert not numbers.is_visible()
    own.locator("summary").click()
    assert numbers.is_visible()
    assert picture.evaluate("found => found.decode().then(() => found.naturalWidth)") > 300
    page.close()


@pytest.mark.parametrize(
    ("path", "title", "cell"),
    [
        ("certify", "Words of a layout", "dpN"),
        ("layouts", "Megatron alone", "dp2-pp2-packs-distopt-tied"),
        ("state", "dp_reshardable", "load-into-live-run"),
    ],
)
def test_a_page_draws_its_grid_below_the_link(browser, address, path, title, cell):
    page = browser.new_page()
    page.goto(f"{address}/{path}/")
    section = page.locator("details", has_text=title).first
    section.locator("summary").click()
    assert section.locator("td", has_text=cell).first.is_visible()
    page.close()


@pytest.mark.parametrize("width", [390, 1440])
@pytest.mark.parametrize(
    "path",
    [
        *("", "concepts/", "supported-models/", "benchmarks/", "train-step/packs/"),
        *("hazards/", "hazards/no-sync-func-reentry/", "hazards/bridge-setup-reentry/"),
        *("matrix/", "layouts/", "state/", "compatibility/", "async/", "api/step/"),
        *("environment/", "troubleshooting/", "train-step/failures/"),
    ],
)
def test_no_page_is_wider_than_its_screen(browser, address, path, width):
    page = browser.new_page(viewport={"width": width, "height": 900})
    page.goto(f"{address}/{path}")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.close()


#: Gives what is wider than the screen and no box around it scrolls.
CUT = """() => [...document.querySelectorAll('.md-content table, .md-content img')].filter(each => {
  if (each.getBoundingClientRect().right <= window.innerWidth) return false;
  for (let box = each.parentElement; box; box = box.parentElement)
    if (['auto', 'scroll'].includes(getComputedStyle(box).overflowX)
        && box.getBoundingClientRect().right <= window.innerWidth) return false;
  return true;
}).map(each => each.outerHTML.slice(0, 80))"""


@pytest.mark.parametrize("path", ["hazards/", "matrix/", "benchmarks/", "compatibility/", "async/"])
def test_what_is_wider_than_a_phone_scrolls_in_a_box_of_its_own(browser, address, path):
    page = browser.new_page(viewport={"width": 390, "height": 900})
    page.goto(f"{address}/{path}")
    assert page.evaluate(CUT) == []
    page.close()


def test_words_in_the_pictures_of_benchmarks_can_be_read_on_a_phone(browser, address):
    page = browser.new_page(viewport={"width": 390, "height": 900})
    page.goto(f"{address}/benchmarks/")
    pictures = page.locator("img[src*='assets/benchmarks/']")
    pictures.first.wait_for(state="attached")
    assert pictures.count() > 10
    page.evaluate("document.querySelectorAll('details').forEach(fold => fold.open = true)")
    for picture in pictures.all():
        # Labels have 13 of the picture's 720 pixels.
        assert picture.evaluate("each => 13 * each.clientWidth / 720") > 10
    page.close()
