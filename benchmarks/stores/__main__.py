"""One large object up and down through each store, against the store's own client, and small ones one by one.

The object is 1 GB of random bytes in a file, as an anchor's shard would be. Each transfer is made by a process of its
own; ``rss`` is the most memory that it ever held, interpreter and libraries included. ``local`` is a directory, its
peer a copy, with ``fsync`` on the way up. ``s3`` is moto, ``hub`` is ``tests/support/hub_store`` with the real
``huggingface_hub`` and ``hf_xet``: client and server share this machine's cores, so these are figures of what the
client costs, not of a network. Downloads are the better of two. What came back is compared with what went up.
``document`` is a small object put and read back, as manifests and HEAD.json are.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from hashlib import file_digest
from pathlib import Path
from typing import Any

from benchmarks.common.rows import Row, parse, row, write
from benchmarks.common.tables import Place, pivot
from vllm_delta_sync.bucket import open_bucket

BENCH = "stores"
PEERS = {"local": "cp", "s3": "boto3", "hub": "huggingface_hub"}
BYTES = 1_000_000_000
QUICK_BYTES = 48_000_000
REPEATS = {"up": 1, "down": 2}
"""Up only once, as the Hub takes nothing that it has. Memory that a virtual machine uses for the first time is slow."""
DOCUMENTS, QUICK_DOCUMENTS = 50, 5
DOCUMENT_BYTES = 2_000


def transfer(client: str, direction: str, url: str, key: str, path: Path) -> dict[str, float]:
    """Seconds and memory of one transfer."""
    command = [sys.executable, "-m", "benchmarks.stores.client", client, direction, url, key, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{client} {direction} {url}: {done.stderr[-2000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


def measure(name: str, url: str, source: Path, folder: Path) -> list[Row]:
    """Rows of one store's large object."""
    rows: list[Row] = []
    size, wanted = source.stat().st_size, digest_of(source)
    seconds: dict[tuple[str, str], float] = {}
    for client in ("ours", PEERS[name]):
        for direction in ("up", "down"):
            # Random bytes anew for each client: the Hub keeps what it has seen before.
            path = source if direction == "up" else folder / "copy"
            tries = []
            for _ in range(REPEATS[direction]):
                (folder / "copy").unlink(missing_ok=True)
                # What transfers before have left to be written to disk is nobody's business here.
                os.sync()
                tries.append(transfer(client, direction, url, f"objects/{client}", path))
            found = min(tries, key=lambda one: one["seconds"])
            found["rss_mb"] = max(one["rss_mb"] for one in tries)
            seconds[client, direction] = found["seconds"]
            case = f"{name} {direction}, {client}"
            rows.append(row(BENCH, case, "speed", size / found["seconds"] / 1e6, "MB/s"))
            rows.append(row(BENCH, case, "rss", found["rss_mb"], "MB"))
        if digest_of(folder / "copy") != wanted:
            raise SystemExit(f"{client}: what came back from {url} is not what went up")
        (folder / "copy").unlink()
        scramble(source)
        wanted = digest_of(source)
    for direction in ("up", "down"):
        ratio = seconds[PEERS[name], direction] / seconds["ours", direction]
        rows.append(row(BENCH, f"{name} {direction}", "ratio", ratio, "x", PEERS[name]))
    return rows


def scramble(path: Path) -> None:
    """Fill a file with other random bytes of the same length."""
    left = path.stat().st_size
    with path.open("wb") as file:
        while left:
            left -= file.write(os.urandom(min(left, 16_000_000)))


def small(name: str, url: str, count: int) -> list[Row]:
    """Rows of documents put and read back one by one."""
    puts, gets = [], []
    data = os.urandom(DOCUMENT_BYTES)
    with open_bucket(url) as bucket:
        for number in range(count):
            began = time.perf_counter()
            bucket.put(f"documents/{number}", data, if_absent=True)
            puts.append(time.perf_counter() - began)
            began = time.perf_counter()
            if bucket.get(f"documents/{number}") != data:
                raise SystemExit(f"{url}: a document came back otherwise")
            gets.append(time.perf_counter() - began)
    return [
        row(BENCH, f"{name}, document", "put p50", 1e3 * statistics.median(puts), "ms"),
        row(BENCH, f"{name}, document", "get p50", 1e3 * statistics.median(gets), "ms"),
    ]


def tables(rows: Sequence[Row]) -> list[str]:
    """Large objects, and beside them documents."""

    def place(item: Row) -> Place:
        case, _, name = item["case"].partition(", ")
        store, _, direction = case.partition(" ")
        if name == "document":
            return store, f"document {'up' if item['metric'].startswith('put') else 'down'}, p50 [ms]"
        if "peer" in item:
            return store, f"{direction}: ours / peer [x]"
        return store, f"{direction}, {'ours' if name == 'ours' else 'peer'}: {item['metric']} [{item['unit']}]"

    return pivot("1 GB (peers: cp, boto3, huggingface_hub)", rows, place)


def main(arguments: list[str] | None = None) -> None:
    # The servers are those of the tests. Rendering results does not need them, so they are imported here.
    from tests.support.stores import STORES

    options = parse(BENCH, __doc__ or "", arguments, minutes=3)
    rows: list[Row] = []
    for name in PEERS:
        with tempfile.TemporaryDirectory(prefix="delta-sync-bench-") as place:
            folder = Path(place)
            source = folder / "source"
            source.touch()
            os.truncate(source, QUICK_BYTES if options.quick else BYTES)
            scramble(source)
            with STORES[name](folder / "store") as store:
                before: dict[str, Any] = dict(os.environ)
                os.environ.update(store.environment)
                try:
                    rows += measure(name, store.url, source, folder)
                    rows += small(name, store.url, QUICK_DOCUMENTS if options.quick else DOCUMENTS)
                finally:
                    os.environ.clear()
                    os.environ.update(before)
    write(options.json, rows)


if __name__ == "__main__":
    main()
