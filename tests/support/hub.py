"""A server on loopback that speaks the part of the Hub's protocol by which models are read."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha1
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tests.support.answers import Answer, Answers, Asked, answering

COMMIT = "0123456789abcdef0123456789abcdef01234567"
API = "/api/models/org/model/"


@contextmanager
def serving(folder: Path) -> Iterator[Answers]:
    """Serve a model's files until the end of the block: ``org/model``, whose branch ``main`` is at ``COMMIT``."""

    def reply(asked: Asked) -> Answer:
        path = unquote(urlsplit(asked.path).path)
        if path in (f"{API}revision/main", f"{API}revision/{COMMIT}"):
            return Answer(body=json.dumps({"id": "org/model", "sha": COMMIT, "siblings": []}).encode())
        if path == f"{API}tree/{COMMIT}":
            return Answer(body=json.dumps([_entry(file, folder) for file in sorted(folder.rglob("*.*"))]).encode())
        if path.startswith(f"/org/model/resolve/{COMMIT}/"):
            data = (folder / path.partition(f"{COMMIT}/")[2]).read_bytes()
            return Answer(body=data, headers={"ETag": f'"{sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT})
        return Answer(404, b"{}", {"X-Error-Code": "RevisionNotFound" if path.startswith(API) else "RepoNotFound"})

    with answering() as answers:
        answers.reply = reply
        yield answers


def _entry(file: Path, folder: Path) -> dict[str, object]:
    data = file.read_bytes()
    name = file.relative_to(folder).as_posix()
    return {"type": "file", "path": name, "size": len(data), "oid": sha1(data).hexdigest()}
