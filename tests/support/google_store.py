"""Google Cloud Storage on loopback, as far as its client here uses it: the XML API that Google shares with S3.

moto serves it (tests.support.s3_store). What is Google's own is in the server too: bearer tokens that a service account
signs, and ``x-goog-if-generation-match: 0``, which creates an object only if there is none. The emulators that can be
installed have only the JSON API for lists and uploads in parts, which obstore does not speak.
"""

import functools
import json
from contextlib import suppress
from pathlib import Path

import jwt
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

PUBLIC_KEY = "TEST_GOOGLE_PUBLIC_KEY"
"""Variable of the server: PEM of the service account's public key."""


@functools.cache
def _key() -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(65537, 2048)


def public_pem() -> str:
    public = _key().public_key()
    return public.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo).decode()


def environment(endpoint: str, folder: Path, key: rsa.RSAPrivateKey | None = None) -> dict[str, str]:
    """What a client needs in its environment to reach the server. Writes the service account's file to the folder.

    Args:
        key: another one than the server knows.
    """
    pem = (key or _key()).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    account = {
        "type": "service_account",
        "client_email": "trainer@loopback.iam.gserviceaccount.com",
        "private_key_id": "loopback",
        "private_key": pem.decode(),
    }
    file = folder / "service-account.json"
    file.write_text(json.dumps(account))
    return {"GOOGLE_BASE_URL": endpoint, "GOOGLE_APPLICATION_CREDENTIALS": str(file)}


def signed(token: str, pem: str) -> bool:
    """Whether a bearer token was signed by the service account."""
    with suppress(jwt.InvalidTokenError):
        jwt.decode(token, pem, algorithms=["RS256"], options={"verify_aud": False})
        return True
    return False
