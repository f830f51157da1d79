"""A headless Chromium over its debugging pipe: no driver, no port, nothing to install but the browser."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
"""The browser of this machine, or None."""


class Page:
    """One page of the browser. Every event is kept in `events`."""

    def __init__(self, to: int, back: int) -> None:
        self._to, self._back, self._rest, self._last = to, back, b"", 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """One command and its answer."""
        self._last += 1
        message: dict[str, Any] = {"id": self._last, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._last:
            self.events.append(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        result: dict[str, Any] = answer["result"]
        return result

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            chunk = os.read(self._back, 1 << 20)
            if not chunk:
                raise RuntimeError("the browser is gone")
            self._rest += chunk
        message, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def open(self, path: Path, *, fragment: str = "", width: int = 1280, dark: bool = False, script: bool = True,
             media: str = "", scale: float = 1) -> None:  # fmt: skip
        """Open a file and wait until it is loaded."""
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=scale, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", media=media, features=[scheme])
        self.send("Emulation.setScriptExecutionDisabled", value=not script)
        self.send("Page.navigate", url="about:blank")
        self.wait("Page.loadEventFired")
        self.events.clear()
        self.send("Page.navigate", url=path.resolve().as_uri() + fragment)
        self.wait("Page.loadEventFired")

    def wait(self, event: str) -> None:
        """Until the event has been seen; it is taken out of `events`."""
        for place, seen in enumerate(self.events):
            if seen.get("method") == event:
                del self.events[place]
                return
        while (message := self._next()).get("method") != event:
            self.events.append(message)

    def value(self, expression: str) -> Any:
        """What an expression comes to in the page. Works without scripts too."""
        found = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"])
        return found["result"].get("value")

    def picture(self, path: Path, *, height: int | None = None, width: int = 1280) -> None:
        """A PNG of the page from its top."""
        whole = height or self.value("document.documentElement.scrollHeight")
        clip = {"x": 0, "y": 0, "width": width, "height": whole, "scale": 1}
        shot = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(shot["data"]))

    def requests(self) -> list[str]:
        """Addresses that were asked for since the page was opened, itself and data: left out."""
        urls = [
            one["params"]["request"]["url"] for one in self.events if one.get("method") == "Network.requestWillBeSent"
        ]
        return [url for url in urls[1:] if not url.startswith("data:")]

    def complaints(self) -> list[str]:
        """Errors and policy violations that the browser wrote to its console."""
        texts = [one["params"]["entry"]["text"] for one in self.events if one.get("method") == "Log.entryAdded"]
        return texts + [str(one["params"]) for one in self.events if one.get("method") == "Runtime.exceptionThrown"]


@contextmanager
def browser() -> Iterator[Page]:
    """A browser with one page, gone at the end."""
    assert BROWSER is not None
    child_in, to = os.pipe()
    back, child_out = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe",
                 "--no-first-run", "--disable-background-networking", f"--user-data-dir={profile}"]  # fmt: skip
        command = ["bash", "-c", f'exec "$@" 3<&{child_in} 4>&{child_out}', "browser", BROWSER, *flags]
        process = subprocess.Popen(
            command, pass_fds=(child_in, child_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(child_in)
        os.close(child_out)
        try:
            yield Page(to, back)
        finally:
            os.close(to)
            process.terminate()
            process.wait(timeout=20)
            os.close(back)
