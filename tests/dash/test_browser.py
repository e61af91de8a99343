"""The dashboard as a person has it: `forge dashboard` in headless Chromium."""

from __future__ import annotations

import time
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

from forge import trace as ev
from forge.runs import RunFolder
from forge.scenario import load
from sim.world import simulate

ROOT = Path(__file__).parent.parent.parent
SCRIPT = spec_from_file_location("dashboard_pictures", ROOT / "reports" / "dashboard.py")
assert SCRIPT is not None
assert SCRIPT.loader is not None
browsing = module_from_spec(SCRIPT)
SCRIPT.loader.exec_module(browsing)

pytest.importorskip("streamlit", reason="the pages need the dash extra: pip install 'forge-rl[dash]'")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(bool(browsing.missing()), reason=browsing.missing()),
    pytest.mark.xdist_group("browser"),
]

SMALL = load("quickstart", ["stop={items=48}", "queue={n=8,batch=4,concurrency=6,group=4}"])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    folder = RunFolder.create(root, SMALL, ["forge"])
    writer = ev.TraceWriter(folder.trace)
    simulate(SMALL, (writer,))
    writer.close()
    folder.path.rename(root / "simulated")
    return root


@pytest.fixture(scope="module")
def address(runs: Path) -> Iterator[str]:
    with browsing.serving(runs) as address:
        yield address


@pytest.fixture(scope="module")
def downloads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("downloads")


@pytest.fixture(scope="module")
def driver(downloads: Path) -> Iterator[Any]:
    with browsing.chromium(1280, 900, downloads) as driver:
        yield driver


def open_page(driver: Any, address: str, page: str) -> None:
    driver.get(browsing.url(address, page))
    browsing.settled(driver)


def texts(driver: Any, css: str) -> list[str]:
    return [one.text for one in driver.find_elements("css selector", css)]


def errors(driver: Any) -> list[str]:
    return texts(driver, "[data-testid=stAlertContentError], [data-testid=stException]")


@pytest.mark.parametrize("page", browsing.PAGES)
def test_every_page_loads_and_says_what_to_look_for(driver: Any, address: str, page: str) -> None:
    open_page(driver, address, page)
    assert errors(driver) == []
    assert texts(driver, "[data-testid=stMain] [data-testid=stCaptionContainer]")[0].startswith("Look at ")
    severe = [line["message"] for line in driver.get_log("browser") if line["level"] == "SEVERE"]
    assert [line for line in severe if "404" not in line] == []
    overflow = "return document.scrollingElement.scrollWidth - document.scrollingElement.clientWidth"
    assert driver.execute_script(overflow) <= 0, "nothing is wider than a laptop's screen"


@pytest.mark.parametrize("page", ["what-if", "run"])
def test_charts_are_drawn(driver: Any, address: str, page: str) -> None:
    open_page(driver, address, page)
    browsing.everything(driver)
    drawn = driver.find_elements(
        "css selector", "[data-testid=stVegaLiteChart] canvas, [data-testid=stVegaLiteChart] svg"
    )
    assert len(drawn) >= 8
    assert all(one.size["width"] > 120 for one in drawn)


def test_a_control_changes_the_result_and_the_download_deploys(driver: Any, address: str, downloads: Path) -> None:
    open_page(driver, address, "what-if")
    before = texts(driver, "table.figures")[0]
    field = driver.find_element("css selector", "input[aria-label='Concurrency']")
    driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", field)
    field.send_keys("\ue009a\ue000", "8", "\ue007")  # all of it, 8, enter
    time.sleep(0.5)
    browsing.settled(driver)
    assert texts(driver, "table.figures")[0] != before
    assert errors(driver) == []
    driver.find_element("css selector", "[data-testid=stDownloadButton] button").click()
    path = downloads / "policy.toml"
    deadline = time.monotonic() + 20
    while not path.is_file() and time.monotonic() < deadline:
        time.sleep(0.1)
    deployed = load("quickstart", policy=path)
    assert (deployed.queue.concurrency, deployed.policy.scheduler.kind) == (8, "windowed_fifo")


@pytest.mark.parametrize(
    ("name", "data", "complaint"),
    [
        ("broken.toml", b"name = ", "broken.toml: not valid TOML"),
        ("photo.toml", b"\x89PNG\xff\xfe", "photo.toml: not a text file"),
        ("keys.toml", b'name = "x"\nstop = {items = 4}\ndomains = [{name = "a"}]\nspeed = 3', "keys.toml: speed"),
    ],
)
def test_a_broken_upload_is_one_sentence(
    driver: Any, address: str, tmp_path: Path, name: str, data: bytes, complaint: str
) -> None:
    (tmp_path / name).write_bytes(data)
    open_page(driver, address, "what-if")
    choose(driver, "Scenario", "an uploaded file")
    driver.find_element("css selector", "input[type=file]").send_keys(str(tmp_path / name))
    time.sleep(0.5)
    browsing.settled(driver)
    found = errors(driver)
    assert len(found) == 1
    assert complaint in found[0]
    assert "\n" not in found[0]


def test_a_trace_is_uploaded_and_an_empty_one_refused(driver: Any, address: str, runs: Path, tmp_path: Path) -> None:
    open_page(driver, address, "run")
    driver.find_element("xpath", "//label[contains(., 'an uploaded trace')]").click()
    browsing.settled(driver)
    upload, scenario = driver.find_elements("css selector", "input[type=file]")
    scenario.send_keys(str(runs / "simulated" / "scenario.resolved.json"))
    browsing.settled(driver)
    upload.send_keys(str(runs / "simulated" / "trace.jsonl"))
    time.sleep(0.5)
    browsing.settled(driver)
    assert errors(driver) == []
    assert "Lag, bound" in texts(driver, "table.figures")[0]
    (tmp_path / "empty.jsonl").write_bytes(b"")
    open_page(driver, address, "run")
    driver.find_element("xpath", "//label[contains(., 'an uploaded trace')]").click()
    browsing.settled(driver)
    driver.find_elements("css selector", "input[type=file]")[0].send_keys(str(tmp_path / "empty.jsonl"))
    time.sleep(0.5)
    browsing.settled(driver)
    assert len(errors(driver)) == 1
    assert "the trace is empty" in errors(driver)[0]


def test_a_live_run_is_followed_to_its_end(driver: Any, address: str, runs: Path) -> None:
    """Its trace grows while the page is open; nobody touches the page."""
    seen: list[ev.Event] = []
    simulate(SMALL, (seen.append,))
    folder = RunFolder.create(runs, SMALL, ["forge"])
    writer = ev.TraceWriter(folder.trace)
    half = len(seen) // 2
    for event in seen[:half]:
        writer(event)
    open_page(driver, address, "run")
    assert "live" in texts(driver, "[data-testid=stMarkdownContainer]")[0] + " ".join(texts(driver, "p"))
    assert any(f"{half:,} events" in text for text in texts(driver, "[data-testid=stCaptionContainer]"))
    for event in seen[half:]:
        writer(event)
    writer.close()
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if any(f"{len(seen):,} events" in text for text in texts(driver, "[data-testid=stCaptionContainer]")):
            break
        time.sleep(0.3)
    else:
        pytest.fail("the page did not follow the run")
    assert errors(driver) == []


def choose(driver: Any, label: str, option: str) -> None:
    box = driver.find_element("xpath", f"//div[@data-testid='stSelectbox'][.//label[contains(., '{label}')]]")
    box.find_element("css selector", "input").click()
    time.sleep(0.3)
    driver.find_element("xpath", f"//*[@role='option'][contains(., '{option}')]").click()
    browsing.settled(driver)
