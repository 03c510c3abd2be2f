"""CURVE keys for notices: who may listen, who may announce, and that nobody reads along.

Key pairs lie in pyzmq's certificate files. An allow-list is a directory of public certificates, or one file.
"""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from struct import error as struct_error

import zmq
from zmq.auth import Authenticator, load_certificate
from zmq.utils import z85

from vllm_delta_sync.errors import SettingsError
from vllm_delta_sync.notice.sockets import Context, LogThrottle, Socket
from vllm_delta_sync.trust.keys import PUBLIC_SUFFIX, check_private, write_pair

SUFFIXES = (PUBLIC_SUFFIX, ".key")
"""What a public certificate's name in a directory ends with: ours and pyzmq's."""
MAX_CERTIFICATE_BYTES = 16 * 1024
MAX_QUESTIONS = 64
KEYGEN = "make one with delta-sync keygen PATH --notice"


@dataclass(frozen=True)
class KeyPair:
    """Own key, in Z85. ``path``: where it came from."""

    public: bytes
    secret: bytes = field(repr=False)
    path: Path


def generate(path: Path) -> str:
    """Write a new secret certificate to ``path`` (mode 600) and its public certificate to ``path``.pub.

    Returns:
        The public key, 40 characters of Z85.

    Raises:
        ConflictError: one of the files is there already; neither is touched. StoreError: they cannot be written.
        SettingsError: ZeroMQ was built without CURVE.
    """
    _check_curve()
    public, secret = zmq.curve_keypair()
    head = f'metadata\ncurve\n    public-key = "{public.decode()}"\n'
    hidden = f'# ZeroMQ CURVE secret certificate: show it to nobody\n\n{head}    secret-key = "{secret.decode()}"\n'
    shown = f"# ZeroMQ CURVE public certificate: for the allow-lists of others\n\n{head}"
    write_pair(path, hidden.encode(), shown.encode())
    return public.decode()


def load_secret(path: Path, what: str = "notice_key") -> KeyPair:
    """Read an own key pair.

    Raises:
        SettingsError: the file cannot be read, is no secret certificate, or can be read by others.
    """
    _check_curve()
    public, secret = _load(path, what)
    check_private(path, what)
    if secret is None:
        raise SettingsError(f"{what} {str(path)!r} is a public certificate; give the secret one, or {KEYGEN}")
    if zmq.curve_public(secret) != public:
        raise SettingsError(f"{what} {str(path)!r} has a public key that does not belong to its secret key; {KEYGEN}")
    return KeyPair(public, secret, path)


def load_public(path: Path, what: str = "notice_server_key") -> bytes:
    """Read somebody's public key: 40 bytes of Z85.

    Raises:
        SettingsError: the file cannot be read, is no certificate, or a secret one.
    """
    public, secret = _load(path, what)
    if secret is not None:
        raise SettingsError(
            f"{what} {str(path)!r} is a secret certificate; give the public one ({path.name}{PUBLIC_SUFFIX}), and keep "
            "the secret one where it was made"
        )
    return public


def client_keys(key: Path | None, server_key: Path | None) -> tuple[KeyPair, bytes] | None:
    """Own key pair and the server's public key, for who connects; None if neither is given.

    Raises:
        SettingsError: only one of them is given, or as ``load_secret`` and ``load_public``.
    """
    if key is None and server_key is None:
        return None
    if key is None or server_key is None:
        missing = "notice_key" if key is None else "notice_server_key"
        raise SettingsError(
            f"{missing} is missing: encrypted notices need notice_key, the own secret certificate, and "
            "notice_server_key, the public certificate of the publisher or broker"
        )
    return load_secret(key), load_public(server_key)


def as_client(socket: Socket, own: KeyPair, server: bytes) -> None:
    """Show a key when connecting, and accept none but that server."""
    socket.curve_publickey, socket.curve_secretkey = own.public, own.secret
    socket.curve_serverkey = server


class AllowList:
    """Public keys in a directory, or in one file; read again whenever something changed there.

    Raises:
        SettingsError: at first, if it cannot be read. Later nobody is allowed while it cannot be read.
    """

    def __init__(self, path: Path, what: str, quiet: LogThrottle) -> None:
        self._path = path
        self._what = what
        self._quiet = quiet
        self._seen: list[tuple[Path, int, int, int]] = []
        self._keys: frozenset[bytes] = frozenset()
        self._seen = self._survey()
        self._keys = frozenset(load_public(file, what) for file, *_ in self._seen)
        if not self._keys:
            quiet.warn(f"{what} {str(path)!r} has no public certificates, so nobody is let in until there are some")

    def __str__(self) -> str:
        return str(self._path)

    @property
    def keys(self) -> frozenset[bytes]:
        """Keys that are allowed now."""
        try:
            seen = self._survey()
        except SettingsError as error:
            self._quiet.warn(f"nobody new is let in: {error.message}")
            return frozenset()
        if seen != self._seen:
            keys = set()
            for file, *_ in seen:
                try:
                    keys.add(load_public(file, self._what))
                except SettingsError as error:
                    self._quiet.warn(f"a key is left out: {error.message}")
            self._seen, self._keys = seen, frozenset(keys)
        return self._keys

    def _survey(self) -> list[tuple[Path, int, int, int]]:
        """The files, and what shows that they changed."""
        try:
            files = [self._path]
            if self._path.is_dir():
                files = sorted(file for file in self._path.iterdir() if file.suffix in SUFFIXES)
            found = [(file, file.stat()) for file in files]
        except OSError as error:
            raise SettingsError(f"{self._what} {str(self._path)!r} cannot be read: {error.strerror}") from error
        return [(file, status.st_mtime_ns, status.st_size, status.st_ino) for file, status in found]


class CurveAuthenticator:
    """Answers ZeroMQ, for sockets of one context, whether a key may come in (ZAP, RFC 27).

    To be served by the thread that has the sockets: when ``socket`` is readable, ``serve``.
    """

    def __init__(self, context: Context, own: KeyPair, quiet: LogThrottle) -> None:
        self._own = own
        self._quiet = quiet
        self._loop = asyncio.new_event_loop()
        self._authenticator = Authenticator(context)
        # Before any socket binds: without an answer ZeroMQ would let everybody in.
        self._authenticator.start()
        self.socket: Socket = self._authenticator.zap_socket

    def guard(self, socket: Socket, domain: str, allowed: AllowList) -> None:
        """Let nobody in at a socket that is yet to bind, but with a key on the list."""
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = self._own.public, self._own.secret
        socket.setsockopt_string(zmq.ZAP_DOMAIN, domain)
        self._authenticator.configure_curve_callback(domain, _Provider(allowed, self._quiet))

    def serve(self) -> None:
        """Answer what is asked."""
        for _ in range(MAX_QUESTIONS):
            try:
                question = self.socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            self._loop.run_until_complete(self._authenticator.handle_zap_message(question))

    def close(self) -> None:
        self._authenticator.stop()
        self._loop.close()


class _Provider:
    """What ``zmq.auth`` asks."""

    def __init__(self, allowed: AllowList, quiet: LogThrottle) -> None:
        self._allowed = allowed
        self._quiet = quiet

    def callback(self, domain: str, key: bytes) -> bool:
        if key in self._allowed.keys:
            return True
        self._quiet.warn(f"refused key {key.decode()} among {domain}: it is not in {self._allowed}")
        return False


def _load(path: Path, what: str) -> tuple[bytes, bytes | None]:
    try:
        if path.stat().st_size > MAX_CERTIFICATE_BYTES:
            raise SettingsError(f"{what} {str(path)!r} is longer than {MAX_CERTIFICATE_BYTES} bytes; no certificate is")
        public, secret = load_certificate(path)
    except OSError as error:
        raise SettingsError(f"{what} {str(path)!r} cannot be read: {error.strerror or error}") from error
    except (ValueError, IndexError) as error:
        raise SettingsError(f"{what} {str(path)!r} is no CURVE certificate; {KEYGEN}") from error
    for key in (public, secret):
        if key is not None and not _is_key(key):
            raise SettingsError(f"{what} {str(path)!r} has a key that is not 40 characters of Z85; {KEYGEN}")
    return public, secret


def _is_key(key: bytes) -> bool:
    if len(key) != 40 or not all(char in z85.Z85CHARS for char in key):
        return False
    try:
        return len(z85.decode(key)) == 32
    except (ValueError, KeyError, OverflowError, struct_error):
        return False


def _check_curve() -> None:
    if not zmq.has("curve"):
        raise SettingsError("this ZeroMQ was built without CURVE; install pyzmq from its own wheels")
