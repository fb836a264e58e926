"""Chromium without a screen, for tests of pages."""

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import time

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")


def find():
    """The path of a browser, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """Chromium without a screen, a context manager; its messages are JSON that ends with a null byte (DevTools)."""

    def __init__(self, profile):
        read, self._write = os.pipe()
        self._read, write = os.pipe()
        # The browser reads from descriptor 3 and writes to 4.
        start = (
            "import os, sys; [os.dup2(int(sys.argv[n]), n + 2) for n in (1, 2)]; os.execv(sys.argv[3], sys.argv[3:])"
        )
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", f"--user-data-dir={profile}"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", start, str(read), str(write), find(), *flags, "about:blank"],
            pass_fds=(read, write), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(read)
        os.close(write)
        self._last, self._buffer, self.events, self.tab, self._profile = 0, b"", [], None, {}

    def __enter__(self):
        self.open_tab()
        return self

    @contextlib.contextmanager
    def new_profile(self):
        """Use a tab that shares nothing with the others."""
        self.tab = None
        self._profile = self.call("Target.createBrowserContext")
        self.open_tab()
        yield self
        self.tab = None
        self.call("Target.disposeBrowserContext", **self._profile)
        self._profile, self.events = {}, []

    def __exit__(self, *_):
        self._process.kill()
        self._process.wait()
        os.close(self._read)
        os.close(self._write)

    def open_tab(self):
        """Open a tab in a window of its own and use it; return what :attr:`tab` is set to, to use it again."""
        self.tab = None
        target = self.call("Target.createTarget", url="about:blank", newWindow=True, **self._profile)["targetId"]
        self.tab = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        return self.tab

    def call(self, method, **parameters):
        """Call a method and return its result; events that come before it are kept."""
        self._last += 1
        message = {"id": self._last, "method": method, "params": parameters}
        if self.tab is not None:
            message["sessionId"] = self.tab
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._last:
                return answer.get("result", {})  # an error if the page changes meanwhile
            self.events.append(answer)

    def evaluate(self, expression):
        """The value of a JavaScript expression, under the policy of the page."""
        options = {"returnByValue": True, "allowUnsafeEvalBlockedByCSP": False}
        return self.call("Runtime.evaluate", expression=expression, **options).get("result", {}).get("value")

    def wait_for(self, expression, seconds=60.0):
        """Wait until an expression is true; look at each frame that the browser draws."""
        end = time.monotonic() + seconds
        while not self.evaluate(expression):
            assert time.monotonic() < end, expression
            self.call("Runtime.evaluate", expression="new Promise(requestAnimationFrame)", awaitPromise=True)

    def press(self, key, code=None, text=""):
        """Press and release a key."""
        code = code or key
        virtual = {"Tab": 9, "Enter": 13, " ": 32}.get(key, 0)
        for kind in ("keyDown", "keyUp"):
            more = {"text": text} if text and kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=code, windowsVirtualKeyCode=virtual, **more)

    def event(self, method, seconds=60.0):
        """Wait for an event, and return its parameters."""
        end = time.monotonic() + seconds
        while not (found := [one for one in self.events if one["method"] == method]):
            assert time.monotonic() < end, method
            self.evaluate("0")  # which reads what has come
        self.events.remove(found[0])
        return found[0]["params"]

    def show(self, address, width, height, scheme="light"):
        """Open a page at a size of the window, in a color scheme."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Page.navigate", url=address)
        self.wait_for("document.readyState === 'complete'")

    def noise(self):
        """Errors and messages of the console so far."""
        kinds = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        return [event["params"] for event in self.events if event["method"] in kinds]

    def requested(self):
        """Addresses requested so far."""
        return [e["params"]["request"]["url"] for e in self.events if e["method"] == "Network.requestWillBeSent"]

    def picture(self, path):
        """Write a picture of the whole page."""
        self.call("Emulation.setScrollbarsHidden", hidden=True)
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        found = self.call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))

    def printed(self, **paper):
        """Print the page; return the PDF. Sizes of the paper are in inches."""
        return base64.b64decode(self.call("Page.printToPDF", **paper)["data"])

    def _receive(self):
        while b"\0" not in self._buffer:
            assert select.select([self._read], [], [], 60.0)[0], "the browser does not answer"
            self._buffer += os.read(self._read, 1 << 20)
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)


needs_browser = pytest.mark.skipif(find() is None, reason="no Chromium is installed (apt-get install chromium)")
