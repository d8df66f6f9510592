"""The cluster's certificates and kubeconfig files, made by openssl."""
import base64
import json
from pathlib import Path

from place import API_IP, KUBECONFIG, NODE, NODE_IP, STATE, run

PKI, CONF = STATE / "pki", STATE / "conf"
USERS = {"admin": "/O=system:masters/CN=admin", "controller-manager": "/CN=system:kube-controller-manager",
         "scheduler": "/CN=system:kube-scheduler", "proxy": "/CN=system:kube-proxy",
         "dns": "/O=system:masters/CN=dns", "kubelet": f"/O=system:nodes/CN=system:node:{NODE}"}


def write_keys() -> None:
    PKI.mkdir()
    certificate("ca", "/CN=kvsteward-ca")
    certificate("front-proxy-ca", "/CN=kvsteward-front-proxy-ca")
    certificate("apiserver", "/CN=kube-apiserver",
                f"subjectAltName=IP:127.0.0.1,IP:{NODE_IP},IP:{API_IP},DNS:localhost,DNS:kubernetes,"
                "DNS:kubernetes.default,DNS:kubernetes.default.svc,DNS:kubernetes.default.svc.cluster.local", ca="ca")
    certificate("kubelet-server", f"/CN={NODE}", f"subjectAltName=DNS:{NODE},IP:127.0.0.1,IP:{NODE_IP}", ca="ca")
    certificate("front-proxy", "/CN=front-proxy", ca="front-proxy-ca")
    for name, subject in USERS.items():
        certificate(name, subject, ca="ca")
        write_kubeconfig(KUBECONFIG if name == "admin" else CONF / f"{name}.conf", name)
    run("openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", PKI / "sa.key")
    run("openssl", "ec", "-in", PKI / "sa.key", "-pubout", "-out", PKI / "sa.pub")


def certificate(name: str, subject: str, *extensions: str, ca: str = "") -> None:
    """Key and certificate, signed by ca or by itself. Every extension that RFC 5280 wants is there: Python 3.13
    verifies strictly, and rejects for example an authority without keyUsage."""
    use = ["basicConstraints=critical,CA:FALSE", "keyUsage=critical,digitalSignature",
           "extendedKeyUsage=serverAuth,clientAuth", "authorityKeyIdentifier=keyid"]
    if not ca:
        use = ["basicConstraints=critical,CA:TRUE", "keyUsage=critical,keyCertSign,cRLSign"]
    key, request, extfile = (PKI / f"{name}.{end}" for end in ("key", "csr", "ext"))
    extfile.write_text("\n".join(["subjectKeyIdentifier=hash", *use, *extensions]))
    signer = ["-CA", PKI / f"{ca}.crt", "-CAkey", PKI / f"{ca}.key", "-CAcreateserial"] if ca else ["-signkey", key]
    run("openssl", "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
        "-keyout", key, "-out", request, "-subj", subject)
    run("openssl", "x509", "-req", "-in", request, *signer, "-days", "365", "-extfile", extfile,
        "-out", PKI / f"{name}.crt")


def write_kubeconfig(file: Path, user: str) -> None:
    def data(name: str) -> str:
        return base64.b64encode((PKI / name).read_bytes()).decode()

    cluster = {"server": "https://127.0.0.1:6443", "certificate-authority-data": data("ca.crt")}
    keys = {"client-certificate-data": data(f"{user}.crt"), "client-key-data": data(f"{user}.key")}
    file.write_text(json.dumps({
        "apiVersion": "v1", "kind": "Config", "current-context": "kvsteward",
        "clusters": [{"name": "kvsteward", "cluster": cluster}], "users": [{"name": user, "user": keys}],
        "contexts": [{"name": "kvsteward", "context": {"cluster": "kvsteward", "user": user}}]}, indent=1))
    file.chmod(0o600)
