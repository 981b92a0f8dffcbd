"""CountingSocket: the engine's socket, counting what its streamer sends."""

from __future__ import annotations

from typing import Any

import zmq


class CountingSocket(zmq.Socket[bytes]):
    """A second object over the engine's socket; however the engine encodes, what it sends passes through `send`."""

    sent_bytes = 0

    @classmethod
    def under(cls, streamer: Any) -> CountingSocket | None:
        """One under a streamer's sender, which becomes one of its own; None on ranks without a socket."""
        sender = streamer.send_to_detokenizer
        socket = getattr(sender, "socket", None)
        if not isinstance(socket, zmq.Socket):
            return None
        counting = cls(shadow=socket)
        streamer.send_to_detokenizer = type(sender)(counting)
        return counting

    def send(self, data: Any, *arguments: Any, **options: Any) -> Any:
        """As `zmq.Socket.send`."""
        self.sent_bytes += len(data)
        return super().send(data, *arguments, **options)
