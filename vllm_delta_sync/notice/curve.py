"""CURVE keys, which encrypt notices and authenticate publishers and subscribers.

``generate``, ``load_secret`` and ``load_public`` write and read pyzmq's certificate files. ``AllowList`` is a directory
of public certificates, or one file; ``CurveAuthenticator`` admits the clients on it.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import zmq
from zmq.auth import Authenticator, create_certificates, load_certificate

from vllm_delta_sync.errors import SettingsError, StoreError
from vllm_delta_sync.logs import LogThrottle
from vllm_delta_sync.notice.sockets import Context, Socket, received
from vllm_delta_sync.trust.keys import PUBLIC_SUFFIX, check_private, write_pair

SUFFIXES = (PUBLIC_SUFFIX, ".key")
"""Suffixes of public certificates in a directory: ours and pyzmq's."""
MAX_CERTIFICATE_BYTES = 16 * 1024
MAX_REQUESTS = 64
KEYGEN = "make one with delta-sync keygen PATH --notice"


@dataclass(frozen=True)
class KeyPair:
    """A key pair in Z85."""

    public: bytes
    secret: bytes = field(repr=False)


def generate(path: Path) -> str:
    """Write a new secret certificate to ``path`` (mode 600) and its public certificate to ``path``.pub.

    Returns:
        The public key, 40 characters of Z85.

    Raises:
        ConflictError: one of the files exists; neither is changed. StoreError: they cannot be written.
        SettingsError: ZeroMQ was built without CURVE.
    """
    _check_curve()
    try:
        # Only this user can enter the folder; ``write_pair`` sets modes, and replaces nothing.
        with TemporaryDirectory() as folder:
            public, secret = create_certificates(folder, "pair")
            write_pair(path, Path(secret).read_bytes(), Path(public).read_bytes())
    except OSError as error:
        raise StoreError(f"the key cannot be made in the temporary directory: {error.strerror}; set TMPDIR") from error
    return load_certificate(path)[0].decode()


def load_secret(path: Path, what: str = "notice_key") -> KeyPair:
    """Read a key pair from a secret certificate.

    Raises:
        SettingsError: the file cannot be read, is not a secret certificate, or is readable by others.
    """
    _check_curve()
    public, secret = _load(path, what)
    check_private(path, what)
    if secret is None:
        raise SettingsError(f"{what} {str(path)!r} is a public certificate; give the secret one, or {KEYGEN}")
    if zmq.curve_public(secret) != public:
        raise SettingsError(f"{what} {str(path)!r} has a public key that does not belong to its secret key; {KEYGEN}")
    return KeyPair(public, secret)


def load_public(path: Path, what: str = "notice_server_key") -> bytes:
    """Read a public key, 40 bytes of Z85, from a public certificate.

    Raises:
        SettingsError: the file cannot be read, is not a certificate, or is a secret one.
    """
    public, secret = _load(path, what)
    if secret is not None:
        raise SettingsError(
            f"{what} {str(path)!r} is a secret certificate; give the public one ({path.name}{PUBLIC_SUFFIX}), and keep "
            "the secret one on the machine where it was generated"
        )
    return public


def all_or_none(files: Mapping[str, str | Path | None], need: str) -> list[Path]:
    """Return the files, by the names of what names them; none if none is given.

    Raises:
        SettingsError: only some are given; ``need`` says what for.
    """
    missing = [name for name, file in files.items() if file is None]
    if missing and len(missing) < len(files):
        raise SettingsError(f"{missing[0]} is missing: {need}")
    return [Path(file) for file in files.values() if file is not None]


def client_keys(key: Path | None, server_key: Path | None) -> tuple[KeyPair, bytes] | None:
    """Load a client's key pair and the server's public key; None if neither is given.

    Raises:
        SettingsError: only one of them is given, or as ``load_secret`` and ``load_public``.
    """
    given = all_or_none(
        {"notice_key": key, "notice_server_key": server_key},
        "encrypted notices need notice_key, the secret certificate of this side, and notice_server_key, the public "
        "certificate of the publisher or broker",
    )
    return (load_secret(given[0]), load_public(given[1])) if given else None


def set_client_keys(socket: Socket, key_pair: KeyPair, server: bytes) -> None:
    """Make a socket present ``key_pair`` when it connects, and accept only that server."""
    socket.curve_publickey, socket.curve_secretkey = key_pair.public, key_pair.secret
    socket.curve_serverkey = server


class AllowList:
    """Public keys in a directory, or in one file; read again when something changes there.

    Raises:
        SettingsError: it cannot be read. Only the constructor raises; later, no key is allowed while it is unreadable.
    """

    def __init__(self, path: Path, what: str, log: LogThrottle) -> None:
        self._path = path
        self._what = what
        self._log = log
        self._seen = self._scan()
        self._keys = frozenset(load_public(file, what) for file, *_ in self._seen)
        if not self._keys:
            log.warn(f"{what} {str(path)!r} has no public certificates, so all clients are refused until it has some")

    def __str__(self) -> str:
        return str(self._path)

    @property
    def keys(self) -> frozenset[bytes]:
        """The keys that are allowed now."""
        try:
            seen = self._scan()
        except SettingsError as error:
            self._log.warn(f"new clients are refused: {error.message}")
            return frozenset()
        if seen != self._seen:
            keys = set()
            for file, *_ in seen:
                try:
                    keys.add(load_public(file, self._what))
                except SettingsError as error:
                    self._log.warn(f"a key is ignored: {error.message}")
            self._seen, self._keys = seen, frozenset(keys)
        return self._keys

    def _scan(self) -> list[tuple[Path, int, int, int]]:
        """Return each file with its mtime, size and inode, which show a change."""
        try:
            files = [self._path]
            if self._path.is_dir():
                # A link that leads nowhere, or a file that is being removed, must not keep out the others.
                files = sorted(file for file in self._path.iterdir() if file.suffix in SUFFIXES and file.exists())
            found = [(file, file.stat()) for file in files]
        except OSError as error:
            raise SettingsError(f"{self._what} {str(self._path)!r} cannot be read: {error.strerror}") from error
        return [(file, status.st_mtime_ns, status.st_size, status.st_ino) for file, status in found]


class CurveAuthenticator:
    """Tells ZeroMQ which keys are admitted to the sockets of one context (ZAP, RFC 27).

    The thread that owns the sockets must call ``serve`` when ``socket`` is readable.
    """

    def __init__(self, context: Context, key_pair: KeyPair, log: LogThrottle) -> None:
        self._key_pair = key_pair
        self._log = log
        self._loop = asyncio.new_event_loop()
        self._authenticator = Authenticator(context)
        # Start before any socket binds: without a ZAP handler ZeroMQ admits every client.
        self._authenticator.start()
        self.socket: Socket = self._authenticator.zap_socket

    def require_keys(self, socket: Socket, domain: str, allowed: AllowList) -> None:
        """Admit only clients with an allowed key to a socket; call this before it binds."""
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = self._key_pair.public, self._key_pair.secret
        socket.setsockopt_string(zmq.ZAP_DOMAIN, domain)
        self._authenticator.configure_curve_callback(domain, _KeyCallback(allowed, self._log))

    def serve(self) -> None:
        """Answer ZeroMQ's pending requests."""
        for request in received(self.socket, MAX_REQUESTS):
            self._loop.run_until_complete(self._authenticator.handle_zap_message(request))

    def close(self) -> None:
        self._authenticator.stop()
        self._loop.close()


class _KeyCallback:
    """The callback object of ``zmq.auth``."""

    def __init__(self, allowed: AllowList, log: LogThrottle) -> None:
        self._allowed = allowed
        self._log = log

    def callback(self, domain: str, key: bytes) -> bool:
        if key in self._allowed.keys:
            return True
        self._log.warn(f"refused key {key.decode()} of {domain}: it is not in {self._allowed}")
        return False


def _load(path: Path, what: str) -> tuple[bytes, bytes | None]:
    try:
        if path.stat().st_size > MAX_CERTIFICATE_BYTES:
            raise SettingsError(
                f"{what} {str(path)!r} has more than {MAX_CERTIFICATE_BYTES} bytes: it is not a certificate; {KEYGEN}"
            )
        public, secret = load_certificate(path)
    except OSError as error:
        raise SettingsError(f"{what} {str(path)!r} cannot be read: {error.strerror or error}") from error
    except (ValueError, IndexError) as error:
        raise SettingsError(f"{what} {str(path)!r} is not a CURVE certificate; {KEYGEN}") from error
    for key in (public, secret):
        if key is not None and not _is_key(key):
            raise SettingsError(f"{what} {str(path)!r} has a key that is not 40 characters of Z85; {KEYGEN}")
    return public, secret


def _is_key(key: bytes) -> bool:
    try:
        zmq.curve_public(key)  # takes any 32 bytes in Z85
    except (ValueError, zmq.ZMQError):
        return False
    return True


def _check_curve() -> None:
    if not zmq.has("curve"):
        raise SettingsError("this ZeroMQ was built without CURVE; install pyzmq from its own wheels")
