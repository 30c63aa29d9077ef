"""Headless Chromium from Debian's packages: a new profile each time, no traffic of its own, every request recorded."""

import base64
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.chrome.webdriver import WebDriver
from selenium.webdriver.common.keys import Keys

from tests.support.waiting import until

PATIENCE_S = 60.0
_QUIET = (
    "--headless=new",
    "--no-sandbox",  # tests may run as root; what is looked at is our own page
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-dev-shm-usage",
    "--disable-domain-reliability",
    "--disable-extensions",
    "--disable-gpu",
    "--disable-sync",
    "--disable-features=Translate,OptimizationHints,MediaRouter,AutofillServerCommunication,CertificateTransparencyComponentUpdater",
    "--metrics-recording-only",
    "--no-first-run",
    "--no-pings",
    "--no-proxy-server",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost",
)


class Browser:
    """A window of its own size, and what was asked for from it."""

    def __init__(self, driver: WebDriver, pictures: Path) -> None:
        self.driver, self._pictures = driver, pictures

    def open(self, address: str) -> None:
        self.driver.get(address)

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        return self.driver.execute_script(f"return {script}")

    def until(self, script: str, check: Callable[[], None] = lambda: None) -> None:
        try:
            until(lambda: bool(self.run(script)), check, PATIENCE_S)
        except AssertionError as error:
            raise AssertionError(
                f"{script} never held; the page says: {self.run('document.body.innerText')}"
            ) from error

    def size(self, width: int, height: int) -> None:
        """In CSS pixels; narrower than any window of a desktop may be."""
        wanted = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", wanted)

    def colours(self, scheme: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def scripts(self, *, allowed: bool) -> None:
        self.driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": not allowed})

    def press(self, key: str) -> None:
        webdriver.ActionChains(self.driver).send_keys(getattr(Keys, key)).perform()

    def picture(self, name: str) -> Path:
        """The whole page, however long, as PNG."""
        whole = self.driver.execute_cdp_cmd("Page.getLayoutMetrics", {})["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": whole["width"], "height": whole["height"], "scale": 1}
        shot = self.driver.execute_cdp_cmd(
            "Page.captureScreenshot", {"format": "png", "captureBeyondViewport": True, "clip": clip}
        )
        path = self._pictures / f"{name}.png"
        path.write_bytes(base64.b64decode(shot["data"]))
        return path

    def requested(self) -> list[str]:
        """Every address that was asked for since this was called last."""
        messages = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]  # type: ignore[no-untyped-call]
        return [
            message["params"]["request"]["url"]
            for message in messages
            if message["method"] == "Network.requestWillBeSent"
        ]

    def complaints(self) -> list[str]:
        """What the console has since this was called last: violations of the policy, errors of scripts, failed
        requests."""
        return [entry["message"] for entry in self.driver.get_log("browser")]  # type: ignore[no-untyped-call]


@contextmanager
def browsing(folder: Path) -> Iterator[Browser]:
    """Pictures go to $LORICA_SCREENSHOTS, else below `folder`. Skips where Chromium or its driver is missing."""
    chromium, driver_program = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver_program is None:
        pytest.skip("Chromium and its driver are not installed (Debian: apt-get install chromium chromium-driver)")
    pictures = Path(os.environ.get("LORICA_SCREENSHOTS") or folder / "screenshots")
    pictures.mkdir(parents=True, exist_ok=True)
    options = Options()
    options.binary_location = chromium
    for argument in (*_QUIET, f"--user-data-dir={folder / 'profile'}"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(driver_program))
    try:
        yield Browser(driver, pictures)
    finally:
        driver.quit()
