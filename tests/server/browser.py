"""A real Chromium without a window, driven by chromedriver over HTTP as W3C's WebDriver has it."""

import base64
import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

from tests.server.servers import free_port

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
CHROMEDRIVER = shutil.which("chromedriver")
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the name that the standard gives to references

# The keys that have no character, as the standard writes them.
ENTER, SHIFT, ESCAPE, TAB = "\ue007", "\ue008", "\ue00c", "\ue004"
RIGHT, UP, DOWN = "\ue014", "\ue013", "\ue015"


class Browser:
    """One tab. Elements are named by CSS selectors, and what is not there yet is waited for."""

    def __init__(self, client: httpx.Client):
        self._client = client
        options = {
            "binary": CHROMIUM,
            "args": [
                "--headless=new",
                "--no-sandbox",  # root may not have one
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--force-device-scale-factor=1",
                "--hide-scrollbars",
            ],
        }
        wanted = {
            "browserName": "chrome",
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
        }
        answer = self._call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self._session = f"/session/{answer['sessionId']}"

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        response = self._client.request(method, path, json=body)
        assert response.status_code == 200, response.json()["value"]["message"]
        return response.json()["value"]

    def _post(self, path: str, **body: Any) -> Any:
        return self._call("POST", self._session + path, body)

    def close(self) -> None:
        self._call("DELETE", self._session)

    def open(self, url: str) -> None:
        self._post("/url", url=url)

    def run(self, script: str, *args: Any) -> Any:
        """What the body of a function in JavaScript returns."""
        return self._post("/execute/sync", script=script, args=args)

    def cdp(self, command: str, **params: Any) -> Any:
        """A command of Chromium's own, for what the standard has no word for."""
        return self._post("/goog/cdp/execute", cmd=command, params=params)

    def _element(self, selector: str) -> str:
        found = self._post("/element", using="css selector", value=selector)
        return f"/element/{found[_ELEMENT]}"

    def click(self, selector: str) -> None:
        self._post(self._element(selector) + "/click")

    def type(self, selector: str, text: str) -> None:
        """Key by key, after what is there."""
        self._post(self._element(selector) + "/value", text=text)

    def press(self, *keys: str) -> None:
        """Keys together, wherever the focus is."""
        down = [{"type": "keyDown", "value": key} for key in keys]
        up = [{"type": "keyUp", "value": key} for key in reversed(keys)]
        self._post("/actions", actions=[{"type": "key", "id": "keyboard", "actions": down + up}])

    def text(self, selector: str) -> str:
        """Of the last such element; empty where there is none."""
        return self.run("return [...document.querySelectorAll(arguments[0])].at(-1)?.innerText ?? ''", selector)

    def is_shown(self, selector: str) -> bool:
        return self.run("return Boolean(document.querySelector(arguments[0])?.checkVisibility())", selector)

    def wait(self, condition: Callable[[], Any], seconds: float = 20) -> Any:
        deadline = time.monotonic() + seconds
        while not (found := condition()):
            assert time.monotonic() < deadline, f"it did not happen; the page says:\n{self.text('body')}"
            time.sleep(0.05)
        return found

    def resize(self, width: int, height: int) -> None:
        """The page itself; windows have a least width."""
        self.cdp("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def prefer(self, scheme: str) -> None:
        """light or dark"""
        self.cdp("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._call("GET", self._session + "/screenshot")))

    def log(self, kind: str = "browser") -> list[dict[str, Any]]:
        """What the console, or the network, has told since the last time."""
        return self._post("/se/log", type=kind)


@contextlib.contextmanager
def running_browser(log: Path) -> Iterator[Browser]:
    assert CHROMEDRIVER is not None
    port = free_port()
    with log.open("wb") as out:
        driver = subprocess.Popen([CHROMEDRIVER, f"--port={port}"], stdout=out, stderr=out, env=dict(os.environ))
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            _wait_for(client, log)
            browser = Browser(client)
            try:
                yield browser
            finally:
                browser.close()
    finally:
        driver.terminate()
        driver.wait(10)


def _wait_for(client: httpx.Client, log: Path) -> None:
    deadline = time.monotonic() + 30
    while True:
        with contextlib.suppress(httpx.TransportError):
            if client.get("/status").json()["value"]["ready"]:
                return
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)
