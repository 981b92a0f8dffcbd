"""PeerMonitor: whether the one peer of a sending socket is still there."""

from __future__ import annotations

import select

import zmq
from zmq.utils.monitor import parse_monitor_message

EVENTS = int(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
READABLE = int(zmq.POLLIN)
_EVENTS_OPTION = int(zmq.EVENTS)  # a plain int: pyzmq is slower with its own enum


class PeerMonitor:
    """Watches a socket for the loss of a peer that was connected. Belongs to the socket's thread."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._monitor = socket.get_monitor_socket(EVENTS)
        self._monitor.linger = 0
        self.connected = False
        # Asking the socket itself takes three times as long. Its descriptor is readable from the moment when
        # something comes, if it was found empty before, until that was looked at: both as in `lost`.
        self._poll = select.poll()
        self._poll.register(int(self._monitor.fd), select.POLLIN)
        self._monitor.get(_EVENTS_OPTION)

    def lost(self) -> bool:
        """Whether a peer that was connected has gone since the last call; cheap where nothing has happened.

        A connection that ends before its handshake is none: zmq keeps the frames and tries again.
        """
        if not self._poll.poll(0):
            return False
        gone = False
        while int(self._monitor.get(_EVENTS_OPTION)) & READABLE:
            event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))["event"]
            gone |= self.connected and event == zmq.EVENT_DISCONNECTED
            self.connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
        return gone

    def close(self) -> None:
        """Stop watching; before the socket is closed."""
        if not self._socket.closed:  # as it is when its shared context was destroyed
            self._socket.disable_monitor()
        self._monitor.close(0)
