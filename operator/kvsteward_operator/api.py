"""The API server: the one module that speaks to it. `Api` is the seam where tests put a fake.

Every call is one HTTP request and raises the errors of `errors.py`. Writes carry one field manager.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, Self

import aiohttp
import msgspec
import yarl

from . import errors
from .kinds import POLICY, Kind, kind_of
from .login import Login

FIELD_MANAGER = "kvsteward-operator"
TIMEOUT = aiohttp.ClientTimeout(total=20, sock_connect=5)
PAGE = 500  # objects a list answer holds

Object = dict[str, Any]


class Api(Protocol):
    """What the operator asks of an API server. Objects are plain JSON values with `apiVersion` and `kind` set."""

    async def get(self, kind: Kind, namespace: str, name: str) -> Object: ...

    async def list(self, kind: Kind, namespace: str | None, selector: str = "") -> list[Object]: ...

    async def apply(self, kind: Kind, body: Object, *, force: bool, dry_run: bool = False) -> Object:
        """Server-side apply. With `force` fields of other managers are taken over, else they are a Conflict. A
        `metadata.uid` in the body makes it a Conflict if the object is another one, or gone."""
        ...

    async def create(self, kind: Kind, body: Object) -> None: ...

    async def delete(self, kind: Kind, namespace: str, name: str, uid: str) -> None:
        """Deletes exactly the object with this uid, its dependents in the background; absence is no error."""
        ...

    async def replace_status(self, namespace: str, name: str, resource_version: str, status: Object) -> Object:
        """Sets a policy's whole status. Raises Conflict when the resource isn't at `resource_version` any more."""
        ...

    async def replace(self, live: Object, fields: Mapping[str, Any]) -> Object:
        """Sets fields, by JSON pointer, of an object that has to be as it is in `live`, else it is a Conflict."""
        ...

    async def schema(self, group_version: str) -> Object:
        """The OpenAPI v3 document of one API group and version. Raises NotFound when it isn't served."""
        ...


def _at_version(resource_version: str) -> dict[str, Any]:
    """Makes a patch a 409 when the object has changed since. A `test` would do too, but a failed one is a 422 that
    can't be told from an invalid object."""
    return {"op": "replace", "path": "/metadata/resourceVersion", "value": resource_version}


class KubernetesApi:
    """`Api` over HTTP. Use as an async context manager."""

    def __init__(self, login: Login) -> None:
        self._login = login
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(ssl=self._login.tls, limit=32)
        self._session = aiohttp.ClientSession(connector=connector, timeout=TIMEOUT, trust_env=False)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def get(self, kind: Kind, namespace: str, name: str) -> Object:
        return self._named(kind, await self._call("GET", kind.path(namespace, name)))

    async def list(self, kind: Kind, namespace: str | None, selector: str = "") -> list[Object]:
        query = {"limit": str(PAGE)} | ({"labelSelector": selector} if selector else {})
        found: list[Object] = []
        while True:
            page = await self._call("GET", kind.path(namespace), query=query)
            found += [self._named(kind, item) for item in page.get("items") or []]
            token = page.get("metadata", {}).get("continue")
            if not token:
                return found
            query["continue"] = token

    async def apply(self, kind: Kind, body: Object, *, force: bool, dry_run: bool = False) -> Object:
        metadata = body["metadata"]
        query = {"fieldManager": FIELD_MANAGER, "force": "true" if force else "false"}
        if dry_run:
            query["dryRun"] = "All"
        try:
            # JSON is YAML, so the body of a server-side apply may be JSON.
            return await self._call(
                "PATCH",
                kind.path(metadata["namespace"], metadata["name"]),
                body=body,
                content_type="application/apply-patch+yaml",
                query=query,
            )
        except errors.Refused as error:
            if "uid" in metadata and "metadata.uid: Invalid value" in str(error):
                raise errors.Conflict(409, str(error)) from None  # another object has the name by now
            raise

    async def create(self, kind: Kind, body: Object) -> None:
        await self._call(
            "POST", kind.path(body["metadata"]["namespace"]), body=body, query={"fieldManager": FIELD_MANAGER}
        )

    async def delete(self, kind: Kind, namespace: str, name: str, uid: str) -> None:
        options = {"propagationPolicy": "Background", "preconditions": {"uid": uid}}
        try:
            await self._call("DELETE", kind.path(namespace, name), body=options)
        except (errors.NotFound, errors.Conflict):
            return  # gone, or another object took its name

    async def replace_status(self, namespace: str, name: str, resource_version: str, status: Object) -> Object:
        patch = [_at_version(resource_version), {"op": "add", "path": "/status", "value": status}]
        return await self._json_patch(POLICY.path(namespace, name, "status"), patch)

    async def replace(self, live: Object, fields: Mapping[str, Any]) -> Object:
        metadata = live["metadata"]
        changes = [{"op": "replace", "path": path, "value": value} for path, value in fields.items()]
        patch = [_at_version(metadata["resourceVersion"]), *changes]
        return await self._json_patch(kind_of(live).path(metadata["namespace"], metadata["name"]), patch)

    async def _json_patch(self, path: str, patch: Sequence[Mapping[str, Any]]) -> Object:
        return await self._call(
            "PATCH",
            path,
            body=patch,
            content_type="application/json-patch+json",
            query={"fieldManager": FIELD_MANAGER},
        )

    async def schema(self, group_version: str) -> Object:
        return await self._call("GET", f"/openapi/v3/apis/{group_version}")

    async def _call(
        self,
        method: str,
        path: str,
        body: Any = None,
        content_type: str = "application/json",
        query: Mapping[str, str] | None = None,
    ) -> Object:
        if self._session is None:
            raise RuntimeError("KubernetesApi is used outside its context")
        url = yarl.URL(self._login.server + path).with_query(query or {})
        headers = {"Accept": "application/json", **self._login.headers()}
        data = None
        if body is not None:
            data, headers["Content-Type"] = msgspec.json.encode(body), content_type
        try:
            async with self._session.request(method, url, data=data, headers=headers) as response:
                answer = await response.read()
                status = response.status
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise errors.Unavailable(0, f"{method} {path}: {type(error).__name__} {error}".rstrip()) from None
        try:
            decoded = msgspec.json.decode(answer) if answer else {}
        except msgspec.DecodeError:
            decoded = {"message": answer[:200].decode(errors="replace")}
        if status >= 300:
            message = f"{method} {path}: {status} {decoded.get('message', '')}".rstrip()
            raise errors.api_error(status, decoded.get("reason", ""), message)
        return decoded if isinstance(decoded, dict) else {}

    @staticmethod
    def _named(kind: Kind, body: Object) -> Object:
        """Items of lists come without their kind."""
        body["apiVersion"], body["kind"] = kind.api_version, kind.name
        return body
