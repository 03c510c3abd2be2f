"""``NoticeSender``: what publishers and brokers share. Both send notices, and repeat the last one of each run."""

import zmq

from vllm_delta_sync.logs import LogThrottle
from vllm_delta_sync.notice import curve
from vllm_delta_sync.notice.messages import LastValues
from vllm_delta_sync.notice.sockets import (
    LINGER_MS,
    MAX_REQUEST_BYTES,
    SERVER_FAILURES,
    HandshakeMonitor,
    PollWaker,
    Socket,
    bind,
    open_socket,
)


class NoticeSender:
    """A socket that sends messages by topic, and what its thread polls and serves beside it.

    Args:
        topics, repeat_seconds: see ``LastValues``.
    """

    def __init__(self, topics: int, repeat_seconds: float, log: LogThrottle) -> None:
        self._log = log
        self._last = LastValues(topics, repeat_seconds)
        self._context = zmq.Context()
        self._wake = PollWaker()
        self._authenticator: curve.CurveAuthenticator | None = None
        self._monitors: list[HandshakeMonitor] = []
        self._socket = open_socket(self._context, zmq.PUB, MAX_REQUEST_BYTES)

    def _admit(self, socket: Socket, domain: str, own: curve.KeyPair, allowed: curve.AllowList) -> None:
        """Admit only clients with an allowed key to a socket; call this before it binds."""
        if self._authenticator is None:
            self._authenticator = curve.CurveAuthenticator(self._context, own, self._log)
        self._authenticator.require_keys(socket, domain, allowed)

    def _bind(self, socket: Socket, address: str) -> str:
        """Bind a socket, whose failed handshakes are logged; returns as ``bind``."""
        monitor = HandshakeMonitor(socket, self._log, address, SERVER_FAILURES)
        self._monitors.append(monitor)
        monitor.address = bind(socket, address)
        return monitor.address

    def _poller(self, *sockets: Socket) -> zmq.Poller:
        """Return a poller of these sockets, and of all that may wake the thread."""
        poller = zmq.Poller()
        authenticator = [] if self._authenticator is None else [self._authenticator.socket]
        for each in (self._wake.fd, *sockets, *authenticator, *(monitor.socket for monitor in self._monitors)):
            poller.register(each, zmq.POLLIN)
        return poller

    def _serve(self) -> None:
        """Answer handshakes, handle events of connections, and repeat what is due."""
        if self._authenticator is not None:
            self._authenticator.serve()
        for monitor in self._monitors:
            monitor.read()
        for frames in self._last.due():
            self._socket.send_multipart(frames, zmq.DONTWAIT)

    def _send_frames(self, frames: list[bytes]) -> None:
        self._last.put(frames)
        self._socket.send_multipart(frames, zmq.DONTWAIT)

    def _close_sockets(self, *others: Socket) -> None:
        for monitor in self._monitors:
            monitor.close()
        for socket in others:
            socket.close(linger=0)
        self._socket.close(linger=LINGER_MS)
        if self._authenticator is not None:
            self._authenticator.close()
        self._context.term()
        self._wake.close()
