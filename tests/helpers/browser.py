"""Headless Chromium over the pipe of its DevTools protocol, with the standard library only."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
TIMEOUT_SECONDS = 60.0
"""Time for an answer on a machine with other programs."""
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--mute-audio",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    "--remote-debugging-pipe",
)


class Browser:
    """One page of a browser that can only reach this machine."""

    def __enter__(self) -> Self:
        assert CHROMIUM
        self.requested_urls, self.errors = [], []
        self._home = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        self._last, self._bytes = 0, b""
        # A shell duplicates the pipes to the descriptors that Chromium uses: 3 for reading, 4 for writing.
        command = [CHROMIUM, *FLAGS, f"--user-data-dir={self._home.name}", "about:blank"]
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "bash", *command],
            pass_fds=(theirs_in, theirs_out),
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._session = ""
        pages = self.call("Target.getTargets")["targetInfos"]
        page = next(info["targetId"] for info in pages if info["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Network", "Page", "Runtime"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setScrollbarsHidden", hidden=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(TIMEOUT_SECONDS)
        os.close(self._in)
        os.close(self._out)
        self._home.cleanup()

    requested_urls: list[str]
    """All addresses that the page requested."""
    errors: list[str]
    """Errors of scripts of the page."""

    def call(self, method: str, **parameters: Any) -> Any:
        """Send a command of the protocol and return its answer; events before the answer are recorded."""
        self._last += 1
        message = {"id": self._last, "method": method, "params": parameters}
        os.write(
            self._out, json.dumps(message | ({"sessionId": self._session} if self._session else {})).encode() + b"\0"
        )
        while True:
            reply = self._read_message()
            if reply.get("id") == self._last:
                assert "error" not in reply, reply
                return reply["result"]
            self._record_event(reply)

    def _read_message(self) -> Any:
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while b"\0" not in self._bytes:
            ready, _, _ = select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "the browser does not answer"
            data = os.read(self._in, 1 << 20)
            assert data, "the browser is gone"
            self._bytes += data
        message, _, self._bytes = self._bytes.partition(b"\0")
        return json.loads(message)

    def _record_event(self, event: Any) -> None:
        if event.get("method") == "Network.requestWillBeSent":
            self.requested_urls.append(event["params"]["request"]["url"])
        if event.get("method") == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(event["params"]["exceptionDetails"])[:2000])

    def open(self, address: str) -> None:
        """Open a page, and wait until its figures are drawn."""
        is_drawn = (
            "[...document.querySelectorAll('.figure')].every(place => place.querySelector('.main-svg') || "
            "place.closest('details:not([open])'))"
        )
        self.navigate(address, f"!!document.getElementById('figures') && {is_drawn}")

    def navigate(self, address: str, ready: str) -> None:
        """Open a page, and wait until it is loaded and an expression is true."""
        self.call("Page.navigate", url=address)
        self.wait_until(f"location.href !== 'about:blank' && document.readyState === 'complete' && {ready}")

    def click(self, x: float, y: float) -> None:
        """Press and release the mouse at a point of the window."""
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=1, clickCount=1)

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression; of a promise, the value with which it resolves."""
        response = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in response, response["exceptionDetails"]
        return response["result"].get("value")

    def cpu_seconds(self) -> float:
        """Return the CPU seconds of the processes that draw pages, which do not depend on other programs."""
        ticks = 0
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # the process may have exited
                command = (process / "cmdline").read_bytes()
                fields = (process / "stat").read_text().rpartition(")")[2].split()
                if b"--type=renderer" in command and self._home.name.encode() in command:
                    ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def wait_until(self, expression: str) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not self.evaluate(f"Boolean({expression})"):
            assert time.monotonic() < deadline, f"not within {TIMEOUT_SECONDS:g} s: {expression}; {self.errors}"
            self.evaluate("new Promise(done => setTimeout(done, 50))")

    def set_viewport(self, width: int, dark: bool = False) -> None:
        """Set the width of the window and the preferred color scheme."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.wait_until(
            f"innerWidth === {width} && matchMedia('(prefers-color-scheme: dark)').matches === {str(dark).lower()}"
        )
        frames = "new Promise(done => setTimeout(() => requestAnimationFrame(() => requestAnimationFrame(done)), 400))"
        self.evaluate(frames)  # plotly resizes figures a moment after the window

    def screenshot(self, file: Path) -> None:
        """Write a PNG of the whole page."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True, optimizeForSpeed=False)
        file.write_bytes(base64.b64decode(shot["data"]))
