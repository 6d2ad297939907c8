"""Headless Chromium, spoken to over a pipe: opens a saved page as a reader would, and tells what it
complained of and what it asked the network for."""

import base64
import itertools
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")


def find() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page of one browser. Use as a context; `events` holds what the browser reported."""

    def __init__(self, profile: Path) -> None:
        self.profile = profile
        self.events: list[dict[str, Any]] = []
        self.numbers = itertools.count(1)
        self.session: str | None = None

    def __enter__(self) -> "Browser":
        there, self.to = os.pipe()
        self.back, here = os.pipe()
        # Chromium reads commands from file descriptor 3 and answers on 4.
        shell = f'exec "$0" "$@" 3<&{there} 4>&{here}'
        command = [find(), *FLAGS, "--remote-debugging-pipe", f"--user-data-dir={self.profile}"]
        self.process = subprocess.Popen(
            ["bash", "-c", shell, *command],
            pass_fds=(there, here),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(there)
        os.close(here)
        self.answers = os.fdopen(self.back, "rb")
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(30)
        self.answers.close()
        os.close(self.to)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Sends a command and waits for its answer; events that come first are kept."""
        number = next(self.numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.to, json.dumps(message).encode() + b"\0")
        while True:
            got = self._next()
            if got.get("id") == number:
                assert "error" not in got, got["error"]
                return got["result"]
            self.events.append(got)

    def open(self, page: Path) -> None:
        self.call("Page.navigate", url=page.resolve().as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next())

    def show_as(self, scheme: str, width: int) -> None:
        """Light or dark, and a window of so many pixels."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def evaluate(self, expression: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def screenshot(self, out: Path) -> None:
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        out.write_bytes(base64.b64decode(shot["data"]))

    @property
    def complaints(self) -> list[dict[str, Any]]:
        """Errors and warnings of the page, and whatever a script would have printed."""
        names = ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown")
        return [event for event in self.events if event.get("method") in names]

    @property
    def requests(self) -> list[str]:
        sent = [e for e in self.events if e.get("method") == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in sent]

    def _next(self) -> dict[str, Any]:
        raw = bytearray()
        while (byte := self.answers.read(1)) != b"\0":
            assert byte, "the browser has gone"
            raw += byte
        return json.loads(raw)
