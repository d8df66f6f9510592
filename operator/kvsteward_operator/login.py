"""Who the operator is to the API server: its service account in a pod, else the kubeconfig. Shared with kopf."""

import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import kopf

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class NoLogin(Exception):
    """There is no way to reach an API server; the text says what was looked for."""


@dataclass(frozen=True)
class Login:
    """Where the API server is and how to prove who asks."""

    connection: kopf.ConnectionInfo
    tls: ssl.SSLContext
    token_file: Path | None = None  # read for every request: projected tokens are replaced while the pod runs

    @property
    def server(self) -> str:
        return self.connection.server.rstrip("/")

    def headers(self) -> dict[str, str]:
        if self.token_file is not None:
            return {"Authorization": f"Bearer {self.token_file.read_text().strip()}"}
        return self.connection.as_http_headers()


def find_login(environment: Mapping[str, str] = os.environ, folder: Path = SERVICE_ACCOUNT) -> Login:
    """Raises NoLogin."""
    host = environment.get("KUBERNETES_SERVICE_HOST")
    token_file = folder / "token"
    if host and token_file.exists():
        # By address, not by the name kubernetes.default.svc: the operator must work while the cluster's DNS doesn't.
        address = f"[{host}]" if ":" in host else host
        connection = kopf.ConnectionInfo(
            server=f"https://{address}:{environment.get('KUBERNETES_SERVICE_PORT', '443')}",
            ca_path=str(folder / "ca.crt"),
            token=token_file.read_text().strip(),
        )
        return Login(connection, connection.as_ssl_context(), token_file)
    try:
        found = kopf.login_with_kubeconfig(settings=kopf.OperatorSettings())
    except (OSError, KeyError, kopf.LoginError) as error:
        raise NoLogin(f"the kubeconfig cannot be used: {type(error).__name__} {error}") from None
    if found is None or not found.server:
        raise NoLogin("no API server: neither a service account nor a kubeconfig was found; set KUBECONFIG")
    return Login(found, found.as_ssl_context())
