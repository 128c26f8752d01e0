"""A page in headless Chromium, by its own protocol over two pipes."""

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium")
# A profile of its own. As root it starts without a sandbox only.
OPTIONS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--remote-debugging-pipe"]
SECONDS = 120  # after which a browser that says nothing is ended


class Page:
    """A tab, to which commands of the protocol are sent one after the other."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers, self._number, self._session = commands, answers, 0, ""
        self.log: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Log", "Runtime"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> Any:
        """Return the answer to a command; what the page logs meanwhile goes to `log`."""
        self._number += 1
        session = {"sessionId": self._session} if self._session else {}
        message = {"id": self._number, "method": method, "params": parameters, **session}
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while (heard := self._heard()).get("id") != self._number:
            pass
        assert "error" not in heard, heard
        return heard["result"]

    def show(self, address: str, width: int, height: int = 900, picture: Path | None = None) -> None:
        """Load a page in a window of this width, a phone's if it is narrow, and keep a picture of it."""
        mobile = width < 600
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": mobile}
        self.send("Emulation.setDeviceMetricsOverride", **size)
        self.send("Page.navigate", url=address)
        self.wait_for_load()
        if picture is not None:
            picture.write_bytes(base64.b64decode(self.send("Page.captureScreenshot")["data"]))

    def wait_for_load(self) -> None:
        """Wait until a page has been loaded since the last command."""
        while self._heard().get("method") != "Page.loadEventFired":
            pass

    def value(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        return self.send("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def _heard(self) -> dict[str, Any]:
        text = b""
        while not text.endswith(b"\0"):
            read = os.read(self._answers, 1)
            assert read, "chromium has ended"
            text += read
        message: dict[str, Any] = json.loads(text[:-1])
        if message.get("method") == "Log.entryAdded":
            self.log.append(message["params"]["entry"]["text"])
        return message


@contextmanager
def chromium(profile: Path) -> Iterator[Page]:
    """Start a browser with one tab, and end it."""
    assert CHROMIUM is not None
    commands_out, commands_in = os.pipe()
    answers_out, answers_in = os.pipe()
    # Chromium reads from 3 and writes to 4.
    words = f'exec 3<&{commands_out} 4>&{answers_in}; exec timeout {SECONDS} "$0" "$@"'
    command = ["bash", "-c", words, CHROMIUM, *OPTIONS, f"--user-data-dir={profile}"]
    with subprocess.Popen(command, pass_fds=(commands_out, answers_in), stderr=subprocess.DEVNULL) as browser:
        os.close(commands_out)
        os.close(answers_in)
        try:
            yield Page(commands_in, answers_out)
        finally:
            os.close(commands_in)  # upon which it ends
            os.close(answers_out)
            browser.terminate()
