"""The real message through the package's own sending and receiving, over zmq."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import zmq
from real import io_struct, sender


class RealWire:
    """A pair of sockets; `carry` sends a message with `SenderWrapper` and returns what `sock_recv` gives."""

    def __init__(self, folder: Path) -> None:
        self._context = zmq.Context()
        self._into, self._out = self._context.socket(zmq.PUSH), self._context.socket(zmq.PULL)
        for socket in (self._into, self._out):
            socket.linger = 0
            socket.rcvtimeo = socket.sndtimeo = 10_000
        self._out.bind(f"ipc://{folder}/real")
        self._into.connect(f"ipc://{folder}/real")
        self._sender = sender(self._into)

    def carry(self, message: Any) -> Any:
        self._sender.send_output(message)
        return io_struct.sock_recv(self._out)

    def __enter__(self) -> RealWire:
        return self

    def __exit__(self, *error: object) -> None:
        self._context.destroy(linger=0)
