"""A limit on the size of requests, which holds before anything is decoded."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]


class TooLarge(Exception):
    """A body with more bytes than allowed."""


class SizeLimit:
    """Answers 413 to requests whose body has more than `max_bytes` bytes, announced or not."""

    def __init__(self, app: App, max_bytes: int) -> None:
        """Wrap an application."""
        self.app, self.max_bytes = app, max_bytes

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Pass a request on, while its body is not too large."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if not announced.isdigit() or int(announced) > self.max_bytes:
            return await self._refuse(send)
        try:
            await self.app(scope, self._counted(receive), send)
        except TooLarge:
            await self._refuse(send)
        return None

    def _counted(self, receive: Receive) -> Receive:
        total = 0

        async def receive_counted() -> Message:
            nonlocal total
            message = await receive()
            total += len(message.get("body", b""))
            if total > self.max_bytes:
                raise TooLarge
            return message

        return receive_counted

    async def _refuse(self, send: Send) -> None:
        detail = f"body: must be at most {self.max_bytes} bytes"
        headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": 413, "headers": headers})
        body = json.dumps({"detail": detail}).encode()
        await send({"type": "http.response.body", "body": body})
