# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""A headless Chromium to test pages in, driven over its debugging pipe."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
"""Command of the browser; None if it is not installed."""

_OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--remote-debugging-pipe"),
)


class Browser:
    """One tab. Records the messages and requests of its pages."""

    def __init__(self, write: int, read: int):
        self._write, self._read = write, read
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self._events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        self.call("Page.setLifecycleEventsEnabled", enabled=True)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and wait for its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != self._number:
            self._events.append(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            data = os.read(self._read, 1 << 20)
            if not data:
                raise RuntimeError("the browser has ended")
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def close(self) -> None:
        """End the browser."""
        self._session = None
        self.call("Browser.close")

    def open(self, page: Path, *, width: int = 1200, height: int = 900, dark: bool = False, address: str = "") -> None:
        """Load a page and wait until its script has finished."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self._load("about:blank")
        self._events.clear()
        self._load(page.resolve().as_uri() + address)

    def _load(self, url: str) -> None:
        loader = self.call("Page.navigate", url=url)["loaderId"]
        loaded = {"name": "load", "loaderId": loader}
        while not any(loaded.items() <= event["params"].items() for event in self._events):
            self._events.append(self._receive())

    def run(self, code: str) -> Any:
        """The value of a JavaScript expression."""
        result = self.call("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(result["exceptionDetails"]["exception"].get("description", result["exceptionDetails"]))
        return result["result"].get("value")

    def press(self, key: str, code: int = 0) -> None:
        """Press a key."""
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def point_at(self, selector: str) -> None:
        """Move the pointer to the middle of an element's first line."""
        # Elements off the screen are laid out when they are scrolled to, which moves them.
        box = self.run(
            f"(async () => {{ const element = document.querySelector({json.dumps(selector)}); "
            "for (let frame = 0; frame < 3; frame++) { element.scrollIntoView({block: 'center'}); "
            "await new Promise((done) => requestAnimationFrame(done)); } "
            "const box = element.getClientRects()[0]; return [box.left + box.width / 2, box.top + box.height / 2]; })()"
        )
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=box[0], y=box[1])

    def complaints(self) -> list[str]:
        """Errors and console messages of the page so far, including policy violations."""
        self.run("1")
        kinds = {"Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"}
        return [json.dumps(event["params"]) for event in self._events if event["method"] in kinds]

    def requests(self) -> list[str]:
        """Requested addresses, including the page itself, without those that its policy blocked."""
        self.run("1")
        network = [event for event in self._events if event["method"].startswith("Network.")]
        blocked = {event["params"]["requestId"] for event in network if event["params"].get("blockedReason") == "csp"}
        sent = [event["params"] for event in network if event["method"] == "Network.requestWillBeSent"]
        return [one["request"]["url"] for one in sent if one["requestId"] not in blocked]


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """Run a browser with an empty profile."""
    assert CHROMIUM is not None
    command_read, command_write = os.pipe()
    answer_read, answer_write = os.pipe()
    # Chromium reads commands from descriptor 3 and writes results to descriptor 4; the shell redirects them.
    plumbing = f'exec "$@" 3<&{command_read} 4>&{answer_write}'
    process = subprocess.Popen(
        ["bash", "-c", plumbing, "bash", CHROMIUM, *_OPTIONS, f"--user-data-dir={profile}", "about:blank"],
        pass_fds=(command_read, answer_write),
        stderr=subprocess.DEVNULL,
    )
    os.close(command_read)
    os.close(answer_write)
    try:
        tab = Browser(command_write, answer_read)
        yield tab
        tab.close()
    finally:
        os.close(command_write)
        os.close(answer_read)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
