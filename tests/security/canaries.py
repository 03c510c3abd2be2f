"""Secrets of every kind that are planted, to be looked for wherever something is shown or kept."""

import base64
from pathlib import Path

from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from vllm_delta_sync.notice import curve
from vllm_delta_sync.trust import keys


class Canaries:
    """Secret files under a directory, and texts.

    Attributes:
        token: an admin token; ``token_file`` has another. signing_key, notice_key, server_key: files; the public half
        lies beside each. url: a bucket's, with user, password and signed query.
    """

    def __init__(self, root: Path) -> None:
        root.mkdir()
        self.token = "canary-token-of-the-environment-4d61"
        self.token_file = root / "token"
        self.token_file.write_text("canary-token-of-the-file-7f20\n")
        self.token_file.chmod(0o600)
        self.signing_key = root / "signing.key"
        keys.generate(self.signing_key)
        self.notice_key, self.server_key = root / "notice.key", root / "server.key"
        curve.generate(self.notice_key)
        curve.generate(self.server_key)
        self.url = (
            "s3://canary-user-83b1:canary/password+5e0c@store.example/bucket/run"
            "?X-Amz-Credential=canary-credential-19aa&X-Amz-Signature=canary-signature-c3d4#canary-fragment-02ef"
        )
        key = keys.load_private(self.signing_key)
        seed = key.private_bytes(Encoding.Raw, PrivateFormat.Raw, NoEncryption())
        body = self.signing_key.read_text().split("-----")[2].replace("\n", "")
        secrets = [curve.load_secret(file).secret.decode() for file in (self.notice_key, self.server_key)]
        self.texts = {
            "admin token of the environment": self.token,
            "admin token of the file": self.token_file.read_text().strip(),
            "signing key, PEM": body,
            "signing key, PEM without its head": body[-40:],
            "signing key, hex": seed.hex(),
            "signing key, base64": base64.b64encode(seed).decode().rstrip("="),
            "CURVE key of the receiver": secrets[0],
            "CURVE key of the publisher": secrets[1],
            "user": "canary-user-83b1",
            "password": "canary/password+5e0c",
            "end of the password": "password+5e0c",
            "credential": "canary-credential-19aa",
            "signature": "canary-signature-c3d4",
            "fragment": "canary-fragment-02ef",
        }
        self.raw = seed

    def in_text(self, text: str) -> list[str]:
        """Names of those in it, as they are, or as repr and JSON write them."""
        forms = {name: {secret, repr(secret)[1:-1], secret.replace("/", "\\/")} for name, secret in self.texts.items()}
        return [name for name, spelled in forms.items() if any(form in text for form in spelled)]

    def in_bytes(self, data: bytes) -> list[str]:
        """As ``in_text``, the bytes of the signing key included."""
        return self.in_text(data.decode("latin-1")) + (["signing key, bytes"] if self.raw in data else [])
