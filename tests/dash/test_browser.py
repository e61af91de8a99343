"""The dashboard as a person has it: `forge dashboard` in headless Chromium."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
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


def until(holds: Callable[[], Any], wait_s: float = 60.0) -> Any:
    """What it gives once that is something; a page takes its time on a busy machine. Fails where it never does."""
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline:
        if found := holds():
            return found
        time.sleep(0.1)
    return pytest.fail("the page never came to it")


def files(driver: Any, count: int) -> list[Any]:
    """The page's places for an upload."""
    return until(lambda: len(found := driver.find_elements("css selector", "input[type=file]")) >= count and found)


def texts(driver: Any, css: str) -> list[str]:
    """In one go: a page that is drawn anew has other elements a moment later."""
    found: list[str] = driver.execute_script(
        "return [...document.querySelectorAll(arguments[0])].map(one => one.innerText)", css
    )
    return found


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
    before = until(lambda: texts(driver, "table.figures"))[0]
    field = driver.find_element("css selector", "input[aria-label='Concurrency']")
    driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", field)
    field.send_keys("\ue009a\ue000", "8", "\ue007")  # all of it, 8, enter
    until(lambda: (now := texts(driver, "table.figures")) and now[0] != before)
    browsing.settled(driver)
    assert errors(driver) == []
    driver.find_element("css selector", "[data-testid=stDownloadButton] button").click()
    path = downloads / "policy.toml"
    until(path.is_file)
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
    files(driver, 1)[0].send_keys(str(tmp_path / name))
    found = until(lambda: errors(driver))
    browsing.settled(driver)
    assert len(found) == 1
    assert complaint in found[0]
    assert "\n" not in found[0]


def test_a_trace_is_uploaded_and_an_empty_one_refused(driver: Any, address: str, runs: Path, tmp_path: Path) -> None:
    open_page(driver, address, "run")
    driver.find_element("xpath", "//label[contains(., 'an uploaded trace')]").click()
    upload, scenario = files(driver, 2)
    scenario.send_keys(str(runs / "simulated" / "scenario.resolved.json"))
    browsing.settled(driver)
    upload.send_keys(str(runs / "simulated" / "trace.jsonl"))
    assert "Lag, bound" in until(lambda: texts(driver, "table.figures"))[0]
    assert errors(driver) == []
    (tmp_path / "empty.jsonl").write_bytes(b"")
    open_page(driver, address, "run")
    driver.find_element("xpath", "//label[contains(., 'an uploaded trace')]").click()
    files(driver, 2)[0].send_keys(str(tmp_path / "empty.jsonl"))
    assert ["the trace is empty" in one for one in until(lambda: errors(driver))] == [True]


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
    assert "● live" in " ".join(texts(driver, "p"))
    until(lambda: any(f"{half:,} events" in text for text in texts(driver, "[data-testid=stCaptionContainer]")))
    for event in seen[half:]:
        writer(event)
    writer.close()
    captions = "[data-testid=stCaptionContainer]"
    until(lambda: any(f"{len(seen):,} events" in text for text in texts(driver, captions)))
    assert errors(driver) == []


def choose(driver: Any, label: str, option: str) -> None:
    box = driver.find_element("xpath", f"//div[@data-testid='stSelectbox'][.//label[contains(., '{label}')]]")
    box.find_element("css selector", "input").click()
    option_xpath = f"//*[@role='option'][contains(., '{option}')]"
    until(lambda: driver.find_elements("xpath", option_xpath))[0].click()
    browsing.settled(driver)
