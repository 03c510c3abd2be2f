"""One transfer in a process of its own, so that its memory can be told: run by ``benchmarks.stores``.

Prints {"seconds", "rss_mb"}; the latter is the most that the process ever held, interpreter and libraries included.
"""

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from vllm_delta_sync.bucket import open_bucket
from vllm_delta_sync.bucket.ranged import download
from vllm_delta_sync.urls import parse_store_url

Transfer = Callable[[str, str, Path], Callable[[], object]]


def ours_up(url: str, key: str, path: Path) -> Callable[[], object]:
    bucket = open_bucket(url)
    return lambda: bucket.put(key, path)


def ours_down(url: str, key: str, path: Path) -> Callable[[], object]:
    bucket = open_bucket(url)
    return lambda: download(bucket, key, bucket.stat(key).bytes, path)


def copied_up(url: str, key: str, path: Path) -> Callable[[], object]:
    """A durable copy, as ``cp`` and ``sync`` of the file make one."""
    target = Path(urlsplit(url).path) / key
    target.parent.mkdir(parents=True, exist_ok=True)

    def copy() -> None:
        shutil.copyfile(path, target)
        with target.open("rb") as file:
            os.fsync(file.fileno())

    return copy


def copied_down(url: str, key: str, path: Path) -> Callable[[], object]:
    return lambda: shutil.copyfile(Path(urlsplit(url).path) / key, path)


def boto3_up(url: str, key: str, path: Path) -> Callable[[], object]:
    import boto3

    place, client = parse_store_url(url), boto3.client("s3")
    return lambda: client.upload_file(str(path), place.authority, f"{place.prefix}/{key}".lstrip("/"))


def boto3_down(url: str, key: str, path: Path) -> Callable[[], object]:
    import boto3

    place, client = parse_store_url(url), boto3.client("s3")
    return lambda: client.download_file(place.authority, f"{place.prefix}/{key}".lstrip("/"), str(path))


def hub_up(url: str, key: str, path: Path) -> Callable[[], object]:
    from huggingface_hub import HfApi

    namespace, name, *run = parse_store_url(url).prefix.split("/")
    return lambda: HfApi().batch_bucket_files(f"{namespace}/{name}", add=[(path, "/".join([*run, key]))])


def hub_down(url: str, key: str, path: Path) -> Callable[[], object]:
    from huggingface_hub import HfApi

    namespace, name, *run = parse_store_url(url).prefix.split("/")
    return lambda: HfApi().download_bucket_files(f"{namespace}/{name}", [("/".join([*run, key]), path)])


TRANSFERS: dict[str, tuple[Transfer, Transfer]] = {
    "ours": (ours_up, ours_down),
    "cp": (copied_up, copied_down),
    "boto3": (boto3_up, boto3_down),
    "huggingface_hub": (hub_up, hub_down),
}


def main(client: str, direction: str, url: str, key: str, path: str) -> None:
    transfer = TRANSFERS[client][direction == "down"](url, key, Path(path))
    began = time.perf_counter()
    transfer()
    seconds = time.perf_counter() - began
    # Not getrusage(): its maximum includes the process that this one was forked from.
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    most = int(status["VmHWM"].split()[0]) / 1024
    print(json.dumps({"seconds": seconds, "rss_mb": most}))


if __name__ == "__main__":
    main(*sys.argv[1:])
