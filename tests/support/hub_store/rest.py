"""The Hub's own routes: buckets, their files, and the way to the content store."""

import json
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote, urlencode

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tests.support.hub_store import ranges
from tests.support.hub_store.access import READ, WRITE, Access, Denied, failure
from tests.support.hub_store.store import Bucket, File, RefusedError, Store

PATHS_PER_REQUEST = 1000


def moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class Rest:
    """Routes under /api/buckets and /buckets, and the downloads that the latter redirect to."""

    def __init__(self, store: Store, access: Access) -> None:
        self._store, self._access = store, access

    def routes(self) -> list[Route]:
        one = "/api/buckets/{space}/{name}"
        resolve = "/buckets/{space}/{name}/resolve/{path:path}"
        return [
            Route(one, self.create, methods=["POST"]),
            Route(one, self.info, methods=["GET"]),
            Route(one, self.delete, methods=["DELETE"]),
            Route(one + "/tree", self.tree, methods=["GET"]),
            Route(one + "/tree/{prefix:path}", self.tree, methods=["GET"]),
            Route(one + "/paths-info", self.paths_info, methods=["POST"]),
            Route(one + "/batch", self.batch, methods=["POST"]),
            Route(one + "/xet-{right}-token", self.xet_token, methods=["GET"]),
            Route(resolve, self.resolve, methods=["GET", "HEAD"]),
            Route("/cdn/file/{hash}", self.download, methods=["GET", "HEAD"]),
        ]

    def bucket(self, request: Request, right: str = READ) -> Bucket:
        """Raises Denied: 401, 403 or 404."""
        self._access.check_user(request, right)
        found = self._store.bucket("{space}/{name}".format_map(request.path_params))
        if found is None:
            raise Denied(failure(404, "Repository not found", "RepoNotFound"))
        return found

    async def create(self, request: Request) -> Response:
        self._access.check_user(request, WRITE)
        id = "{space}/{name}".format_map(request.path_params)
        body = json.loads(await request.body() or b"{}")
        made = self._store.create_bucket(id, body.get("visibility") == "private")
        url = f"{_origin(request)}/buckets/{id}"
        if made is None:
            return JSONResponse({"error": "You already created this bucket", "url": url}, 409)
        return JSONResponse({"url": url, "name": id, "id": made.inner})

    async def info(self, request: Request) -> Response:
        bucket = self.bucket(request)
        files, size = self._store.totals(bucket)
        told = {"id": bucket.id, "private": bucket.private, "createdAt": moment(bucket.created)}
        return JSONResponse({"_id": bucket.inner, **told, "size": size, "totalFiles": files})

    async def delete(self, request: Request) -> Response:
        self._store.delete_bucket(self.bucket(request, WRITE))
        return Response(status_code=204)

    async def tree(self, request: Request) -> Response:
        """One page of all files below a prefix; its clients never ask for folders."""
        bucket, limit = self.bucket(request), self._access.options.page
        after = request.query_params.get("cursor", "")
        found = self._store.files(bucket, request.path_params.get("prefix", ""), after, limit + 1)
        headers = {}
        if len(found) > limit:
            query = urlencode({**request.query_params, "cursor": found[limit - 1].path})
            headers["Link"] = f'<{_origin(request)}{quote(request.url.path)}?{query}>; rel="next"'
        return JSONResponse([describe(file) for file in found[:limit]], headers=headers)

    async def paths_info(self, request: Request) -> Response:
        bucket = self.bucket(request)
        paths = json.loads(await request.body())["paths"]
        if len(paths) > PATHS_PER_REQUEST:
            return failure(400, f"{len(paths)} paths, at most {PATHS_PER_REQUEST} are allowed")
        found = [self._store.file(bucket, path) for path in paths]
        return JSONResponse([describe(file) for file in found if file])

    async def batch(self, request: Request) -> Response:
        bucket = self.bucket(request, WRITE)
        lines = [json.loads(line) for line in (await request.body()).splitlines() if line.strip()]
        failed = []
        for line in lines:
            try:
                self._apply(bucket, line)
            except RefusedError as error:
                failed.append({"path": line["path"], "error": str(error)})
        done = len(lines) - len(failed)
        told = {"success": not failed, "processed": len(lines), "succeeded": done, "failed": failed}
        return JSONResponse(told, 422 if failed and not done else 200)

    def _apply(self, bucket: Bucket, line: dict[str, Any]) -> None:
        """Raises RefusedError: this line's operation failed, the others stand."""
        if line["type"] == "deleteFile":
            found = self._store.delete_file(bucket, line["path"])
            if not found and self._access.options.strict_delete:
                raise RefusedError("file does not exist")
            return
        if line["type"] != "addFile":
            raise RefusedError(f"operation {line['type']!r} is unknown")
        self._store.put_file(bucket, line["path"], line["xetHash"], line.get("mtime", 0), line.get("contentType"))

    async def xet_token(self, request: Request) -> Response:
        right = request.path_params["right"]
        if right not in (READ, WRITE):
            return failure(404, "no such token")
        bucket = self.bucket(request, right)
        if right == WRITE and self._store.is_full(bucket):
            return failure(403, f"Storage quota of bucket {bucket.id} is used up")
        token, expiry = self._access.xet_token(bucket, right)
        content = self._access.content
        headers = {
            "X-Xet-Cas-Url": content,
            "X-Xet-Access-Token": token,
            "X-Xet-Token-Expiration": str(expiry),
        }
        return JSONResponse({"casUrl": content, "accessToken": token, "exp": expiry}, headers=headers)

    async def resolve(self, request: Request) -> Response:
        bucket = self.bucket(request)
        file = self._store.file(bucket, request.path_params["path"])
        if file is None:
            return failure(404, "Entry not found", "EntryNotFound")
        refresh = f"{_origin(request)}/api/buckets/{bucket.id}/xet-read-token"
        fields = {"type": file.kind} if file.kind else {}
        headers = {
            "Location": self._access.signed(f"/cdn/file/{file.hash}", **fields),
            "X-Xet-Hash": file.hash,
            "X-Linked-Size": str(file.size),
            "X-Linked-ETag": f'"{file.hash}"',
            "Link": f'<{refresh}>; rel="xet-auth"',
        }
        return Response(status_code=302, headers=headers)

    async def download(self, request: Request) -> Response:
        self._access.check_signed(request)
        content = self._store.content(request.path_params["hash"])
        span = ranges.wanted(request, content.size)
        if span is None:
            return ranges.beyond(content.size)
        body = self._store.read(content, *span)
        kind = request.query_params.get("type", "application/octet-stream")
        return ranges.answer(request, content.size, span, body, Content_Type=kind, ETag=f'"{content.hash}"')


def describe(file: File) -> dict[str, Any]:
    """A file as listings show it."""
    told = {"type": "file", "path": file.path, "size": file.size, "xetHash": file.hash}
    told |= {"mtime": moment(file.mtime / 1000), "uploadedAt": moment(file.uploaded)}
    return told | ({"contentType": file.kind} if file.kind else {})


def _origin(request: Request) -> str:
    return f"{request.url.scheme}://{request.url.netloc}"
