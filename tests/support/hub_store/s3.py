"""The S3 gateway: the same files through /s3/NAMESPACE/BUCKET/KEY."""

import hashlib
import re
import time
from collections.abc import AsyncIterator
from email.utils import formatdate
from pathlib import Path
from typing import Any
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from anyio import to_thread
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tests.support.hub_store import ranges
from tests.support.hub_store.access import READ, WRITE, Access, Denied
from tests.support.hub_store.intake import Intake
from tests.support.hub_store.rest import moment
from tests.support.hub_store.store import Bucket, File, RefusedError, Store

KEYS_PER_LISTING = 1000


class Gateway:
    """What obstore and boto3 use: objects, listings, bulk deletes, uploads in parts. Signatures are not checked."""

    def __init__(self, store: Store, access: Access) -> None:
        self._store, self._access = store, access

    def routes(self) -> list[Route]:
        one = "/s3/{space}/{name}"
        return [
            Route(one, self.of_bucket, methods=["GET", "HEAD", "POST", "PUT"]),
            Route(one + "/", self.of_bucket, methods=["GET", "HEAD", "POST", "PUT"]),
            Route(one + "/{key:path}", self.of_key, methods=["GET", "HEAD", "PUT", "DELETE", "POST"]),
        ]

    def _bucket(self, request: Request, right: str) -> Bucket:
        """Raises Denied: 403 for a key id that is unknown or may only read, 404 for no bucket."""
        found = re.search(r"Credential=([^/]+)/", request.headers.get("authorization", ""))
        options = self._access.options
        if not found or found[1] not in (options.s3_key, options.s3_read_key):
            raise Denied(_error(403, "InvalidAccessKeyId", "The access key id is not known"))
        if right == WRITE and found[1] != options.s3_key:
            raise Denied(_error(403, "AccessDenied", "The access key may only read"))
        bucket = self._store.bucket("{space}/{name}".format_map(request.path_params))
        if bucket is None:
            raise Denied(_error(404, "NoSuchBucket", "The specified bucket does not exist"))
        return bucket

    async def of_bucket(self, request: Request) -> Response:
        if request.method == "POST" and "delete" in request.query_params:
            return await self._delete_many(request)
        bucket = self._bucket(request, READ)
        if request.method == "GET":
            return self._list(bucket, request)
        return Response(status_code=200 if request.method == "HEAD" else 409)

    async def of_key(self, request: Request) -> Response:
        key = request.path_params["key"]
        if request.method in ("GET", "HEAD"):
            return self._get(self._bucket(request, READ), key, request)
        bucket = self._bucket(request, WRITE)
        if request.method == "POST":
            return await self._post(bucket, key, request)
        if request.method == "DELETE":
            if "uploadId" in request.query_params:
                self._forget_parts(request.query_params["uploadId"])
            else:
                self._store.delete_file(bucket, key)
            return Response(status_code=204)
        if "partNumber" in request.query_params:
            return await self._put_part(request)
        return await self._put(bucket, key, request.stream(), request)

    def _get(self, bucket: Bucket, key: str, request: Request) -> Response:
        file = self._store.file(bucket, key)
        if file is None:
            return _error(404, "NoSuchKey", "The specified key does not exist", request.method == "HEAD")
        span = ranges.wanted(request, file.size)
        if span is None:
            return ranges.beyond(file.size)
        kind = file.kind or "binary/octet-stream"
        if request.method == "GET" and self._access.options.s3_redirect:
            location = self._access.signed(f"/cdn/file/{file.hash}", type=kind, modified=str(int(file.uploaded)))
            return Response(status_code=302, headers={"Location": location})
        body = self._store.read(self._store.content(file.hash), *span)
        modified = formatdate(file.uploaded, usegmt=True)
        head = {"Content_Type": kind, "ETag": f'"{file.hash}"', "Last_Modified": modified}
        return ranges.answer(request, file.size, span, body, **head)

    async def _put(self, bucket: Bucket, key: str, blocks: AsyncIterator[bytes], request: Request) -> Response:
        absent = request.headers.get("if-none-match") == "*"
        before = self._store.file(bucket, key)
        if absent and before:
            return _error(412, "PreconditionFailed", "At least one of the preconditions did not hold")
        matching = request.headers.get("if-match")
        if matching and (before is None or f'"{before.hash}"' != matching):
            return _error(412, "PreconditionFailed", "At least one of the preconditions did not hold")
        intake = Intake(self._store)
        try:
            async for block in blocks:
                await to_thread.run_sync(intake.write, block)
        except BaseException:
            intake.discard()
            raise
        hash = await to_thread.run_sync(intake.finish, bucket.inner)
        now = int(time.time() * 1000)
        try:
            made = self._store.put_file(bucket, key, hash, now, request.headers.get("content-type"), absent)
        except RefusedError as error:
            return _error(403, "QuotaExceeded" if "quota" in str(error) else "InvalidArgument", str(error))
        if made is None:
            return _error(412, "PreconditionFailed", "At least one of the preconditions did not hold")
        return Response(headers={"ETag": f'"{hash}"'})

    def _list(self, bucket: Bucket, request: Request) -> Response:
        asked = request.query_params
        if asked.get("list-type") != "2":
            return _error(501, "NotImplemented", "Only ListObjectsV2 is supported")
        prefix, delimiter = asked.get("prefix", ""), asked.get("delimiter", "")
        after = asked.get("continuation-token") or asked.get("start-after", "")
        limit = min(int(asked.get("max-keys", KEYS_PER_LISTING)), KEYS_PER_LISTING, self._access.options.page)
        parts: list[str] = []
        more = False
        # Every page of the store is one query; a folder is passed over by asking again after it.
        while not more:
            found = self._store.files(bucket, prefix, after, limit + 1)
            skipped = False
            for file in found:
                if len(parts) == limit:
                    more = True
                    break
                folder, cut, _ = file.path[len(prefix) :].partition(delimiter) if delimiter else ("", "", "")
                if cut:
                    parts.append(f"<CommonPrefixes><Prefix>{escape(prefix + folder + cut)}</Prefix></CommonPrefixes>")
                    after = prefix + folder + cut + "\U0010ffff"
                    skipped = True
                    break
                parts.append(_entry(file))
                after = file.path
            if not more and not skipped:
                break
        told = f"<Name>{escape(bucket.id)}</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(parts)}</KeyCount>"
        told += f"<MaxKeys>{limit}</MaxKeys><IsTruncated>{str(more).lower()}</IsTruncated>"
        if more:
            told += f"<NextContinuationToken>{escape(after)}</NextContinuationToken>"
        return _xml(f"<ListBucketResult>{told}{''.join(parts)}</ListBucketResult>")

    async def _delete_many(self, request: Request) -> Response:
        bucket = self._bucket(request, WRITE)
        tree = ElementTree.fromstring(await request.body())
        keys = [element.text or "" for element in tree.iter() if element.tag.rpartition("}")[2] == "Key"]
        for key in keys:
            self._store.delete_file(bucket, key)
        told = "".join(f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in keys)
        return _xml(f"<DeleteResult>{told}</DeleteResult>")

    # Uploads in parts

    async def _post(self, bucket: Bucket, key: str, request: Request) -> Response:
        where = f"<Bucket>{escape(bucket.id)}</Bucket><Key>{escape(key)}</Key>"
        if "uploads" in request.query_params:
            folder = self._store.incoming()
            folder.mkdir()
            told = f"{where}<UploadId>{folder.name}</UploadId>"
            return _xml(f"<InitiateMultipartUploadResult>{told}</InitiateMultipartUploadResult>")
        upload = request.query_params.get("uploadId", "")
        tree = ElementTree.fromstring(await request.body())
        numbers = [int(element.text or 0) for element in tree.iter() if element.tag.rpartition("}")[2] == "PartNumber"]
        paths = [self._parts(upload) / str(number) for number in numbers]
        if not all(path.exists() for path in paths):
            return _error(400, "InvalidPart", "A part was not uploaded")
        answer = await self._put(bucket, key, _joined(paths), request)
        if answer.status_code != 200:
            return answer
        self._forget_parts(upload)
        told = f"{where}<ETag>{escape(answer.headers['ETag'])}</ETag>"
        return _xml(f"<CompleteMultipartUploadResult>{told}</CompleteMultipartUploadResult>")

    async def _put_part(self, request: Request) -> Response:
        folder, number = self._parts(request.query_params["uploadId"]), int(request.query_params["partNumber"])
        if not folder.is_dir():
            return _error(404, "NoSuchUpload", "The upload does not exist")
        size = await ranges.save(request, folder / str(number))
        tag = hashlib.sha256(f"{folder.name} {number} {size}".encode()).hexdigest()
        return Response(headers={"ETag": f'"{tag}"'})

    def _parts(self, upload: str) -> Path:
        """Raises Denied: no upload has such a name."""
        if not re.fullmatch(r"[0-9a-f]{24}", upload):
            raise Denied(_error(404, "NoSuchUpload", "The upload does not exist"))
        return self._store.folder / "incoming" / upload

    def _forget_parts(self, upload: str) -> None:
        folder = self._parts(upload)
        for path in folder.iterdir() if folder.is_dir() else ():
            path.unlink()
        if folder.is_dir():
            folder.rmdir()


async def _joined(paths: list[Path]) -> AsyncIterator[bytes]:
    for path in paths:
        for block in ranges.blocks(path, 0, path.stat().st_size):
            yield block


def _entry(file: File) -> str:
    told = f"<Key>{escape(file.path)}</Key><LastModified>{moment(file.uploaded)}</LastModified>"
    told += f"<ETag>&quot;{file.hash}&quot;</ETag><Size>{file.size}</Size><StorageClass>STANDARD</StorageClass>"
    return f"<Contents>{told}</Contents>"


def _xml(body: str, status: int = 200, **headers: Any) -> Response:
    return Response('<?xml version="1.0" encoding="UTF-8"?>' + body, status, media_type="application/xml")


def _error(status: int, code: str, message: str, bare: bool = False) -> Response:
    if bare:
        return Response(status_code=status)
    return _xml(f"<Error><Code>{code}</Code><Message>{escape(message)}</Message></Error>", status)
