"""The dashboard's pages as pictures, taken in headless Chromium of what `forge dashboard` serves.

    .venv/bin/python reports/dashboard.py [--runs runs] [--out reports/dashboard] [--width 1440] [--all]

Needs Debian's chromium and chromium-driver, and the `dash` and `dev` extras. Without --all the one picture of the
README: a what-if on the quickstart. Tests of the pages in a browser use `serving` and `chromium` of this module.
"""

from __future__ import annotations

import argparse
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

from forge.types import ForgeError

HERE = Path(__file__).parent
PAGES = ("what-if", "run", "trajectory", "trace", "tune")
COLOURS = 96  # of a picture: charts need no more, and it stays small


@contextmanager
def serving(runs: Path, *, wait_s: float = 60.0) -> Iterator[str]:
    """`forge dashboard` at a free port until the context ends; gives its address. Raises ForgeError if it fails."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "forge", "dashboard", "--runs", str(runs), "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    address = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + wait_s
        while not _answers(f"{address}/_stcore/health"):
            if process.poll() is not None or time.monotonic() > deadline:
                process.kill()
                raise ForgeError(f"forge dashboard does not answer: {process.communicate()[0].decode()}")
            time.sleep(0.1)
        yield address
    finally:
        process.terminate()
        process.communicate(timeout=30)


def _answers(url: str) -> bool:
    try:
        with urlopen(url, timeout=2) as reply:
            return bool(reply.status == 200)
    except (URLError, ConnectionError, TimeoutError):
        return False


def missing() -> str:
    """Why no browser can be driven; empty: one can."""
    if not any(map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))):
        return "no Chromium: apt-get install chromium chromium-driver"
    if not shutil.which("chromedriver"):
        return "no chromedriver: apt-get install chromium-driver"
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "no selenium: pip install 'forge-rl[dev]'"
    return ""


def url(address: str, page: str) -> str:
    """The first page is the one without a path."""
    return f"{address}/" if page == PAGES[0] else f"{address}/{page}"


@contextmanager
def chromium(width: int, height: int, downloads: Path | None = None) -> Iterator[Any]:
    """A Selenium driver of a headless Chromium of that size. Raises ForgeError where there is none."""
    if why := missing():
        raise ForgeError(why)
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    arguments = ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--hide-scrollbars")
    for argument in (*arguments, f"--window-size={width},{height}"):
        options.add_argument(argument)
    if downloads is not None:
        options.add_experimental_option("prefs", {"download.default_directory": str(downloads)})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        driver.set_window_size(width, height)
        yield driver
    finally:
        driver.quit()


def settled(driver: Any, *, wait_s: float = 60.0) -> None:
    """Wait until the page has something on it and has nothing left to do. Raises ForgeError where it never does."""
    deadline, quiet = time.monotonic() + wait_s, 0
    busy = (
        "return document.querySelector('[data-testid=stStatusWidget], [data-testid=stSpinner], "
        "[data-testid=stSkeleton], [data-stale=true]') !== null || "
        "document.querySelector('[data-testid=stHeading], [data-testid=stException]') === null"
    )
    while quiet < 4:
        if time.monotonic() > deadline:
            raise ForgeError(f"{driver.current_url}: still at work after {wait_s:g} s")
        quiet = 0 if driver.execute_script(busy) else quiet + 1
        time.sleep(0.15)


def whole(driver: Any, width: int, least: int = 900) -> None:
    """Make the window as high as the page."""
    script = "return document.querySelector('[data-testid=stMainBlockContainer]').scrollHeight"
    driver.set_window_size(width, max(least, int(driver.execute_script(script)) + 160))
    time.sleep(1.0)


def everything(driver: Any) -> None:
    """Have all charts drawn, where the page has them."""
    for one in driver.find_elements("xpath", "//button[contains(., 'everything')]"):
        one.click()
        time.sleep(0.5)
        settled(driver)


def shoot(driver: Any, path: Path) -> None:
    """A PNG of few colours, so that it is small."""
    from PIL import Image

    driver.save_screenshot(str(path))
    with Image.open(path) as picture:
        picture.convert("RGB").quantize(COLOURS).save(path, optimize=True)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--runs", type=Path, default=Path("runs"))
    arguments.add_argument("--out", type=Path, default=HERE / "dashboard")
    arguments.add_argument("--width", type=int, default=1440)
    arguments.add_argument("--all", action="store_true", help="every page to its whole length")
    given = arguments.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    with serving(given.runs) as address, chromium(given.width, 2900) as driver:
        for page in PAGES if given.all else PAGES[:1]:
            driver.get(url(address, page))
            settled(driver)
            if given.all:
                everything(driver)
                whole(driver, given.width)
                settled(driver)
            path = given.out / f"{page}.png"
            shoot(driver, path)
            print(f"{path}: {path.stat().st_size // 1024} KB")


if __name__ == "__main__":
    try:
        main()
    except ForgeError as error:
        sys.exit(f"error: {error}")
