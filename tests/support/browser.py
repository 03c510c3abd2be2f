"""A real headless Chromium, driven by its own chromedriver: Debian's packages chromium and chromium-driver."""

import base64
import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from tests.support.answers import closed_port

PROGRAMS = ("chromium", "chromedriver")
INSTALL = "apt-get install --no-install-recommends chromium chromium-driver fonts-inter"
SECONDS = 60
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *(
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--force-color-profile=srgb",
        "--disable-dev-shm-usage",
    ),
)
KEYS = {"Tab": "\ue004", "ArrowLeft": "\ue012", "ArrowRight": "\ue014", "ArrowUp": "\ue013", "ArrowDown": "\ue015"}
KEYS |= {"Home": "\ue011", "End": "\ue010", "Enter": "\ue007"}


def missing() -> str | None:
    """What is needed and not there, in a sentence; None when all is."""
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    return f"{' and '.join(absent)} not found; {INSTALL}" if absent else None


class Browser:
    """One window. Requests to other hosts than this machine fail the test that asks for ``requests``."""

    def __init__(self, client: httpx.Client) -> None:
        self._client = client

    def _call(self, path: str, body: dict[str, Any] | None = None) -> Any:
        reply = self._client.get(path) if body is None else self._client.post(path, json=body)
        value = reply.json()["value"]
        if isinstance(value, dict) and "error" in value:
            raise AssertionError(f"chromedriver: {value['error']}: {value['message']}")
        return value

    def _devtools(self, command: str, **parameters: Any) -> Any:
        return self._call("goog/cdp/execute", {"cmd": command, "params": parameters})

    def look(self, width: int = 1240, height: int = 900, dark: bool = False, scale: float = 1) -> None:
        self._devtools(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=width < 600,
        )
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._devtools("Emulation.setEmulatedMedia", media="screen", features=[theme])

    def open(self, url: str) -> None:
        """Open a page, and wait until it shows a document that it has read to the end."""
        self._call("url", {"url": url})
        self.until("return document.documentElement.dataset.shown === 'yes' && !document.title.startsWith('Reading')")

    def script(self, text: str, *arguments: Any) -> Any:
        """Run JavaScript in the page; its ``return`` value. The page's own policy does not bind it."""
        return self._call("execute/sync", {"script": text, "args": list(arguments)})

    def until(self, condition: str, *arguments: Any) -> Any:
        """Wait for a script to return something true."""
        deadline = time.monotonic() + SECONDS
        while not (found := self.script(condition, *arguments)):
            assert time.monotonic() < deadline, condition
            time.sleep(0.05)
        return found

    def text(self, selector: str = "body") -> str:
        """What a reader sees of an element."""
        return str(self.script("return document.querySelector(arguments[0]).innerText", selector))

    def press(self, *names: str) -> None:
        """Press keys one after the other."""
        events = [{"type": kind, "value": KEYS[name]} for name in names for kind in ("keyDown", "keyUp")]
        self._call("actions", {"actions": [{"type": "key", "id": "keyboard", "actions": events}]})

    def screenshot(self, height: int | None = None) -> bytes:
        """A PNG of the whole page, or of its first ``height`` pixels."""
        size = self._devtools("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], height or 10**6), "scale": 1}
        taken = self._devtools("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        return base64.b64decode(taken["data"])

    def hosts(self) -> set[str]:
        """Hosts that requests went to since this was last asked, without those within the browser."""
        urls = [
            message["params"]["request"]["url"]
            for entry in self._call("se/log", {"type": "performance"})
            if (message := json.loads(entry["message"])["message"])["method"] == "Network.requestWillBeSent"
        ]
        return {urlsplit(url).netloc for url in urls if not url.startswith(("data:", "about:", "chrome"))}

    def complaints(self) -> list[str]:
        """Errors and warnings in the console, such as what the Content-Security-Policy refused."""
        return [f"{row['level']}: {row['message']}" for row in self._call("se/log", {"type": "browser"})]


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """Start a browser whose profile is in an empty folder, and end it with the block."""
    port = closed_port()
    with open(folder / "chromedriver.log", "wb") as log:
        driver = subprocess.Popen(["chromedriver", f"--port={port}"], stdout=log, stderr=log)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=SECONDS, trust_env=False) as client:
            session = _session(client, folder / "profile")
            client.base_url = client.base_url.join(f"/session/{session}/")
            try:
                yield Browser(client)
            finally:
                client.delete(re.sub("/$", "", str(client.base_url)))
    finally:
        driver.terminate()
        driver.wait(SECONDS)


def _session(client: httpx.Client, profile: Path) -> str:
    wanted = {
        "browserName": "chrome",
        "goog:chromeOptions": {"binary": shutil.which("chromium"), "args": [*FLAGS, f"--user-data-dir={profile}"]},
        "goog:loggingPrefs": {"performance": "ALL", "browser": "ALL"},
    }
    deadline = time.monotonic() + SECONDS
    while True:
        try:
            reply = client.post("/session", json={"capabilities": {"alwaysMatch": wanted}})
            break
        except httpx.ConnectError:
            assert time.monotonic() < deadline, "chromedriver does not answer"
            time.sleep(0.1)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["value"]["sessionId"])
