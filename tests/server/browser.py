"""A page in headless Chromium, driven over the DevTools protocol; for tests on machines that have one."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp

__all__ = ["CHROMIUM", "Page", "browsing"]

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-port=0",
)

KEYS = {"Enter": (13, "\r"), "Escape": (27, ""), "Tab": (9, "")}
"""Virtual key codes, and the text that a key makes."""


class Page:
    """One tab. What it logs and asks the network for is kept."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._number = 0
        self.requested: list[str] = []
        """Every address that the page has asked for."""
        self.bodies: list[Any] = []
        """The JSON of every POST."""
        self.complaints: list[str] = []
        """Errors in its console: of scripts, of the network, and of its security policy."""

    async def call(self, method: str, **params: Any) -> Any:
        """The result of one command; events that come before it are noted."""
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": params})
        while True:
            message = await self._socket.receive_json()
            match message:
                case {"id": self._number}:
                    return message.get("result")
                case {"method": "Network.requestWillBeSent", "params": {"request": request}}:
                    self.requested.append(request["url"])
                    if request.get("postData"):
                        self.bodies.append(json.loads(request["postData"]))
                case {"method": "Log.entryAdded", "params": {"entry": entry}} if entry["level"] == "error":
                    self.complaints.append(entry["text"])
                case {"method": "Runtime.exceptionThrown", "params": {"exceptionDetails": details}}:
                    self.complaints.append(str(details))

    async def value(self, expression: str) -> Any:
        """What an expression of JavaScript is, awaited if it is a promise."""
        found = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def type(self, text: str) -> None:
        """Put text where the focus is."""
        await self.call("Input.insertText", text=text)

    async def press(self, key: str, *, shift: bool = False) -> None:
        """Press and release a key of `KEYS` where the focus is."""
        code, text = KEYS[key]
        event = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": 8 if shift else 0}
        await self.call("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", text=text, **event)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    async def resize(self, width: int, height: int) -> None:
        """Show the page in a window of so many pixels."""
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    async def until(self, expression: str) -> None:
        """Wait until it is true; a page that is not there yet has nothing to evaluate."""
        async with asyncio.timeout(30):
            while not await self.value(f"(() => {{ try {{ return {expression} }} catch {{ return false }} }})()"):  # noqa: ASYNC110
                await asyncio.sleep(0.02)


@asynccontextmanager
async def browsing(folder: Path, url: str) -> AsyncIterator[Page]:
    """Open `url`; the browser keeps its files in `folder` and ends with the block."""
    assert CHROMIUM is not None
    process = await asyncio.create_subprocess_exec(
        CHROMIUM,
        *FLAGS,
        f"--user-data-dir={folder}",
        "about:blank",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        port = await _port(folder / "DevToolsActivePort")
        async with aiohttp.ClientSession() as http:
            async with http.get(f"http://127.0.0.1:{port}/json/list") as response:
                [tab] = [each for each in await response.json() if each["type"] == "page"]
            async with http.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                page = Page(socket)
                for domain in ("Network", "Log", "Runtime", "Page"):
                    await page.call(f"{domain}.enable")
                await page.call("Page.navigate", url=url)
                yield page
                await page.call("Browser.close")
    finally:
        with suppress(TimeoutError):
            async with asyncio.timeout(5):
                await process.wait()
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _port(file: Path) -> int:
    """The port that the browser has chosen, once it has written it down."""
    async with asyncio.timeout(30):
        while True:
            with suppress(OSError, ValueError):
                return int(file.read_text().splitlines()[0])  # noqa: ASYNC240 - nothing else waits in this test
            await asyncio.sleep(0.05)
