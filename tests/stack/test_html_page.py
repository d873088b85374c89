"""The HTML report in a real browser: Debian's Chromium, with the network watched, and axe-core for accessibility."""

import json
import re

import pytest

from benchmarks.simulated_run import SimulatedRun, write_run
from stack.jobs import REQUIRED, must_have, wait_for
from telemetry.cli import main

HOSTILE = "</script><script>window.hit=1</script><img src=x onerror=window.hit=1>\"'$$x$$"

pytestmark = pytest.mark.stack


def needed(module):
    if REQUIRED:
        return __import__(module, fromlist=["_"])
    return pytest.importorskip(module)


@pytest.fixture(scope="module")
def page_file(tmp_path_factory):
    """The page of 24 ranks over two hours. All text that a log can choose is hostile."""
    needed("bokeh")
    folder = tmp_path_factory.mktemp("page")
    write_run(folder, SimulatedRun(ranks=24, seconds=7200, interval_seconds=20))
    for path in (folder / "logs").iterdir():
        text = path.read_text().replace('"simulated"', json.dumps(HOSTILE))
        path.write_text(re.sub('"gpu-00(.)"', lambda found: json.dumps(f"node {found[1]} {HOSTILE}"), text))
    snapshot = {
        "time": "2026-03-02T06:40:00.000Z",
        "event": "snapshot",
        "run": HOSTILE,
        "rank": 0,
        "pid": 4000,
        "node": f"node 0 {HOSTILE}",
    }
    snapshot |= {"path": f"snapshots/{HOSTILE}.json", "first_step": 10, "last_step": 14, "reason": HOSTILE}
    with (folder / "logs" / "rank-0.4000.jsonl").open("a") as file:
        file.write(json.dumps(snapshot) + "\n")
    assert main(["report", str(folder), "--html", str(folder / "report.html")]) == 0
    return folder / "report.html"


@pytest.fixture(scope="module")
def browser():
    chromium, api = must_have("chromium"), needed("playwright.sync_api")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def opened(browser, page_file):
    """Opens the page, and keeps what it said and asked for."""
    tabs = []

    def open_page(**options):
        tab = browser.new_page(viewport={"width": 1200, "height": 900}, reduced_motion="reduce", **options)
        tabs.append(tab)
        tab.said, tab.requests = [], []
        tab.on("console", lambda message: tab.said.append((message.type, message.text)))
        tab.on("pageerror", lambda error: tab.said.append(("error", str(error))))
        tab.on("request", lambda request: tab.requests.append(request.url))
        tab.add_init_script("onload = () => { window.drawnAtLoad = document.documentElement.dataset.drawn }")
        tab.goto(page_file.as_uri())
        tab.drawn_at_load = tab.evaluate("drawnAtLoad")
        return tab

    yield open_page
    for tab in tabs:
        tab.close()


def test_no_error_no_request_and_hostile_text_is_text(opened, page_file):
    tab = opened()
    assert [text for kind, text in tab.said if kind in {"error", "warning"}] == []
    outside = [url for url in tab.requests if not url.startswith(("data:", "blob:"))]
    assert outside == [page_file.as_uri()]
    assert tab.evaluate("window.hit") is None
    assert HOSTILE in tab.locator(".run").inner_text()
    figures = tab.locator("figure")
    assert tab.evaluate("+document.documentElement.dataset.drawn") == figures.count() >= 15
    assert tab.locator("figure canvas").count() >= figures.count()


def test_all_charts_are_drawn_when_the_page_has_loaded(opened):
    """A screenshot from the command line is made at that moment."""
    blank = """canvas => !canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data.some(Boolean)"""
    tab = opened()
    assert tab.drawn_at_load == str(tab.locator("figure").count())
    for chart in tab.locator("figure").all():
        canvases = chart.locator("canvas").all()
        assert not all(canvas.evaluate(blank) for canvas in canvases), chart.get_attribute("data-chart")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing(opened, theme):
    axe = needed("axe_playwright_python.sync_playwright").Axe()
    tab = opened(color_scheme=theme)
    for details in tab.locator("details").all():
        details.evaluate("each => { each.open = true }")
    violations = axe.run(tab).response["violations"]
    assert [(each["id"], [node["html"][:120] for node in each["nodes"]][:3]) for each in violations] == []


def tips_at(tab, chart, x, y):
    """The texts of the tooltips at a place in a chart, in pixels from its corner."""
    plot = tab.locator(f"[data-chart={chart}] .plot")
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    tab.mouse.move(box["x"] + x, box["y"] + y)
    tips = tab.locator(".bk-Tooltip .bk-tooltip-content")
    wait_for("a tooltip", lambda: any(tips.all_inner_texts()))
    return "\n".join(tips.all_inner_texts())


def test_the_pointer_reads_values(opened):
    tab = opened()
    told = tips_at(tab, "ledger", 600, 80)
    shares = re.findall(r"([\d.]+) %", told)
    assert len(shares) == 6 and sum(map(float, shares)) == pytest.approx(100, abs=0.5)
    assert re.search(r"2026-03-02 0[67]:\d\d", told)
    told = tips_at(tab, "ranks", 200, 150)
    assert re.search(r"rank \d+ \(node \d", told) and re.search(r"19\d\d MHz", told)  # as it was sampled
    assert HOSTILE in told
    tab.locator("[data-metrics]").select_option("step")
    assert tab.locator("[data-metric]:visible").inner_text().endswith(" ms")
    assert re.search(r"4\d\d(\.\d)? ms", tips_at(tab, "ranks", 210, 150))
    width = tab.locator("[data-chart=marks] .plot").bounding_box()["width"]
    assert "rank 12: gpu_throttled" in tips_at(
        tab, "marks", 0.6 * width, 12
    )  # 07:06 to 07:26 of two hours from 06:00 on
    assert tab.evaluate("window.hit") is None


def test_zoom_by_button_drag_and_double_click_is_shared(opened):
    tab = opened()
    spans = """() => Bokeh.documents[0].roots().filter(plot => plot.x_range?.name === "time")
        .map(plot => plot.x_range.end - plot.x_range.start)"""
    (whole,) = set(tab.evaluate(spans))
    tab.locator("[data-zoom=in]").click()
    assert set(tab.evaluate(spans)) == {whole / 2}
    tab.locator("[data-zoom=all]").click()
    assert set(tab.evaluate(spans)) == {whole}
    plot = tab.locator("[data-chart=step-percentiles] .plot")
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    tab.mouse.move(box["x"] + 300, box["y"] + 60)
    tab.mouse.down()
    tab.mouse.move(box["x"] + 500, box["y"] + 70, steps=4)
    tab.mouse.up()
    wait_for("the zoom of all charts", lambda: max(tab.evaluate(spans)) < whole / 3)
    tab.mouse.dblclick(box["x"] + 300, box["y"] + 60)
    wait_for("the whole run", lambda: set(tab.evaluate(spans)) == {whole})


def test_a_print_fits_the_paper(opened, tmp_path):
    tab = opened()
    widths = "[...document.querySelectorAll('.plot')].map(plot => Math.round(plot.getBoundingClientRect().width))"
    wide = tab.evaluate(widths)
    assert max(wide) > 900
    tab.evaluate(f"addEventListener('beforeprint', () => {{ window.printed = {widths} }})")
    paper = {"width": "210mm", "height": "297mm", "margin": dict.fromkeys(("left", "right", "top", "bottom"), "1cm")}
    tab.pdf(path=tmp_path / "page.pdf", **paper)  # 718 px between the margins
    assert 400 < max(tab.evaluate("printed")) <= 718
    assert tab.evaluate(widths) == wide  # as before, on the screen
    tab.set_viewport_size({"width": 720, "height": 900})
    tab.emulate_media(media="print")
    beyond = """() => [...document.querySelectorAll("main *")].filter(
        each => each.getBoundingClientRect().right > 720).map(each => `${each.tagName} ${each.className}`).slice(0, 5)"""
    wait_for("the charts are as narrow", lambda: max(tab.evaluate(widths)) <= 720)
    assert tab.evaluate(beyond) == []
