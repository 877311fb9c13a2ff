"""A page in headless Chromium: pictures, print and what the page did, over the DevTools pipe.

The protocol is JSON texts with a zero byte behind each, on file descriptors 3 and 4 of the browser:
https://chromedevtools.github.io/devtools-protocol/.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-pipe",
)


def find_chromium() -> str | None:
    """The browser's path; None if there is none."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


class Browser:
    """One tab of a browser. Not for threads."""

    def __init__(self, requests: int, answers: int, complaints: Path) -> None:
        """Open the tab.

        Args:
            requests, answers: ends of the pipes to and from the browser.
            complaints: what the browser writes to its standard error.
        """
        self._requests, self._answers, self._complaints = requests, answers, complaints
        self._received = bytearray()
        self._last_id = 0
        self._events: list[dict[str, Any]] = []
        self._session = ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and wait for its answer; events underway are kept."""
        self._last_id += 1
        message: dict[str, Any] = {"id": self._last_id, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        sent = json.dumps(message).encode() + b"\0"
        while sent:
            sent = sent[os.write(self._requests, sent) :]
        while (answer := self._receive()).get("id") != self._last_id:
            self._events.append(answer)
        assert "error" not in answer, f"{method}: {answer['error']}"
        return dict(answer["result"])

    def open(self, path: Path, width: int, scheme: str, media: str = "") -> None:
        """Load a file in a window of that width.

        Args:
            path: the page.
            width: in CSS pixels.
            scheme: ``light`` or ``dark``, what the reader's system prefers.
            media: ``print``, or the screen.
        """
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", media=media, features=features)
        metrics = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **metrics)
        self._events.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self._events):
            self._events.append(self._receive())

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def screenshot(self) -> bytes:
        """The whole page as PNG."""
        answer = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        return base64.b64decode(answer["data"])

    def print(self) -> bytes:
        """The page as PDF, without backgrounds, as browsers print by default."""
        answer = self.call("Page.printToPDF", printBackground=False)
        return base64.b64decode(answer["data"])

    def requests(self) -> list[str]:
        """Addresses that were asked for since ``open``, the page's own among them."""
        return [
            event["params"]["request"]["url"]
            for event in self._events
            if event["method"] == "Network.requestWillBeSent"
        ]

    def complaints(self) -> list[dict[str, Any]]:
        """What the page's console was told since ``open``."""
        methods = {"Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"}
        return [event for event in self._events if event["method"] in methods]

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._received:
            received = os.read(self._answers, 1 << 20)
            assert received, f"the browser has ended: {self._complaints.read_text()[-2000:]}"
            self._received += received
        message, _, self._received = self._received.partition(b"\0")
        return dict(json.loads(message))


@contextmanager
def open_browser(chromium: str) -> Iterator[Browser]:
    """A browser with a fresh profile, ended with the block."""
    to_browser, from_browser = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        complaints = Path(folder) / "stderr"
        # The shell sets up descriptors 3 and 4; bash, since sh may know none of two digits.
        redirect = f'exec "$@" 3<&{to_browser[0]} 4>&{from_browser[1]}'
        command = [chromium, *FLAGS, f"--user-data-dir={folder}/profile"]
        with complaints.open("wb") as stderr:
            process = subprocess.Popen(
                ["bash", "-c", redirect, "bash", *command],
                pass_fds=(to_browser[0], from_browser[1]),
                stdout=subprocess.DEVNULL,
                stderr=stderr,
            )
        os.close(to_browser[0])
        os.close(from_browser[1])
        try:
            yield Browser(to_browser[1], from_browser[0], complaints)
        finally:
            os.close(to_browser[1])
            os.close(from_browser[0])
            process.terminate()
            process.wait()
