"""A headless Chromium, driven by its own protocol over a pair of pipes, without another library."""

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
"""The path of the browser; None where there is none."""
SECONDS = 20.0

_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--use-fake-device-for-media-stream",
    "--use-fake-ui-for-media-stream",
)
_START = (
    "import os, sys; _, commands, answers, *program = sys.argv; "
    "os.dup2(int(commands), 3); os.dup2(int(answers), 4); os.execv(program[0], program)"
)

_BRING = """(way, files, into) => {
  const list = new DataTransfer(), byId = (id) => document.getElementById(id);
  const bytes = (data) => Uint8Array.from(atob(data), (one) => one.charCodeAt(0));
  for (const [name, type, data] of files) list.items.add(new File([bytes(data)], name, { type }));
  const more = { bubbles: true, cancelable: true };
  const send = (id, event) => byId(id).dispatchEvent(event);
  if (way === "drop") send("chat", new DragEvent("drop", { ...more, dataTransfer: list }));
  if (way === "paste") send("input", new ClipboardEvent("paste", { ...more, clipboardData: list }));
  if (way !== "choose") return;
  byId(into).files = list.files;
  send(into, new Event("change"));
}"""


class Tab:
    """One page. `complaints` has every error that the browser logged: of scripts, rules and addresses."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._rest = b""
        self._number = 0
        self._session: str | None = None
        self._target: str | None = None
        self.complaints: list[str] = []

    def open(self, url: str, width: int = 1200, height: int = 900) -> None:
        """Opens a page in place of the last one."""
        self._session = None  # what the last page complains of while it closes is not of this one
        if self._target is not None:
            self._call("Target.closeTarget", targetId=self._target)
        self._target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=self._target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", **size)
        self._call("Page.navigate", url=url)

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        done = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in done:
            raise RuntimeError(done["exceptionDetails"]["exception"].get("description", script))
        return done["result"].get("value")

    def wait(self, script: str) -> Any:
        """The value of an expression once it is true."""
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            with suppress(RuntimeError):  # the page is being replaced by another
                if value := self.run(script):
                    return value
            time.sleep(0.05)
        raise TimeoutError(f"{script} did not come true; the page shows: {self.text()}")

    def text(self) -> str:
        return self.run("document.body.innerText")

    def press(self, key: str) -> None:
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            more = {
                **(text if kind == "keyDown" else {}),
                **({"windowsVirtualKeyCode": 9} if key == "Tab" else {}),
            }
            self._call("Input.dispatchKeyEvent", type=kind, key=key, code=key, **more)

    def bring(self, way: str, *files: tuple[str, str, bytes], into: str = "files") -> None:
        """Chooses, drops or pastes files (names, types, contents), as the way is called."""
        sent = [(name, kind, base64.b64encode(data).decode()) for name, kind, data in files]
        self.run(f"({_BRING})({json.dumps(way)}, {json.dumps(sent)}, {json.dumps(into)})")

    def fields(self) -> list[tuple[str, str]]:
        """The role and the name that a screen reader says of each thing that takes the focus."""
        found: list[tuple[str, str]] = []
        for node in self._call("Accessibility.getFullAXTree")["nodes"]:
            properties = {one["name"]: one["value"].get("value") for one in node.get("properties", ())}
            if not node.get("ignored") and properties.get("focusable"):
                found.append((node["role"]["value"], node.get("name", {}).get("value", "")))
        return found

    def picture(self, path: Path) -> None:
        """Writes what is seen of the page now, as PNG."""
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"]))

    def _call(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None and not method.startswith("Target."):
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]
            self._note(answer)

    def _note(self, event: dict[str, Any]) -> None:
        if event.get("sessionId") != self._session:
            return  # it is of a page that is closed
        match event.get("method"):
            case "Log.entryAdded" if event["params"]["entry"]["level"] == "error":
                entry = event["params"]["entry"]
                self.complaints.append(f"{entry['text']} {entry.get('url', '')}")
            case "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(event["params"]["exceptionDetails"]))
            case _:
                pass

    def _read(self) -> dict[str, Any]:
        deadline = time.monotonic() + SECONDS
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(self._answers, 1 << 16) if ready else b""
            if not data:
                raise RuntimeError("the browser does not answer")
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)


@contextmanager
def browser() -> Iterator[Tab]:
    """Starts Chromium; `PROGRAM` must be there."""
    assert PROGRAM is not None
    read_commands, commands = os.pipe()
    answers, write_answers = os.pipe()
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [
                *(sys.executable, "-c", _START, str(read_commands), str(write_answers), PROGRAM, *_FLAGS),
                *("--remote-debugging-pipe", f"--user-data-dir={profile}"),
            ],
            pass_fds=(read_commands, write_answers),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_commands)
        os.close(write_answers)
        try:
            yield Tab(commands, answers)
        finally:
            os.close(commands)  # at which it ends
            os.close(answers)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
