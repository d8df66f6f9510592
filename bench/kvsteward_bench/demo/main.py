"""Tells the story: `python -m kvsteward_bench.demo.main cluster|local`. Exit 0 only if all of it was seen."""

import argparse
import asyncio
import secrets
import sys
import tempfile
import time
from pathlib import Path

from .cluster_site import ClusterSite, KubectlFailed, kubectl
from .local_site import LocalFailed, LocalSite
from .site import Tenant
from .story import NotSeen, Story

BEGUN = time.monotonic()


def say(text: str) -> None:
    print(f"[{time.monotonic() - BEGUN:5.1f} s] {text}", flush=True)


def new_tenants() -> tuple[Tenant, Tenant]:
    return Tenant("acme", secrets.token_urlsafe(32)), Tenant("globex", secrets.token_urlsafe(32))


async def on_laptop(policy: Path, model: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="kvsteward-demo-") as folder:
        site = LocalSite(policy, model, Path(folder), new_tenants())
        try:
            say("kvsteward local: starting engine and sidecar")
            await site.open()
            say(f"ready: {site.url}")
            await Story(site, say).tell()
        finally:
            await site.close()


async def on_cluster(manifests: list[Path], namespace: str, policy: str, model: str) -> None:
    """Applies the manifests and keys for two tenants, and leaves them there for a look."""
    tenants = new_tenants()
    if not await kubectl("get", "namespace", namespace, "--ignore-not-found"):
        await kubectl("create", "namespace", namespace)
    await kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted", "--overwrite")
    keys = [f"--from-literal={tenant.name}={tenant.key}" for tenant in tenants]
    secret = await kubectl(
        "-n", namespace, "create", "secret", "generic", "tenant-keys", *keys, "--dry-run=client", "-o", "yaml"
    )
    await kubectl("apply", "-f", "-", given=secret)
    for manifest in manifests:
        await kubectl("-n", namespace, "apply", "-f", str(manifest))
        say(f"kubectl apply -f {manifest}")
    await kubectl("-n", namespace, "wait", "--for=condition=Ready", f"kvcp/{policy}", "--timeout=300s")
    say(f"policy {policy} is Ready")
    site = ClusterSite(namespace, policy, model, tenants)
    try:
        await site.open()
        await Story(site, say).tell()
    finally:
        await site.close()


def main() -> int:
    parser = argparse.ArgumentParser(prog="demo", description=__doc__)
    places = parser.add_subparsers(dest="place", required=True)
    local = places.add_parser("local", help="by `kvsteward local`, without a cluster")
    local.add_argument("--policy", type=Path, required=True)
    local.add_argument("--model", type=Path, required=True, help="checkpoint folder")
    cluster = places.add_parser("cluster", help="on the cluster that kubectl talks to; operator and CRD installed")
    cluster.add_argument("--manifest", type=Path, action="append", required=True, help="applied in this order")
    cluster.add_argument("--namespace", default="serving")
    cluster.add_argument("--policy", default="support-chat")
    cluster.add_argument("--model", default="smollm2-135m-instruct", help="the name that clients send")
    args = parser.parse_args()
    try:
        if args.place == "local":
            asyncio.run(on_laptop(args.policy, args.model))
        else:
            asyncio.run(on_cluster(args.manifest, args.namespace, args.policy, args.model))
    except NotSeen as error:
        say(f"the demo failed: {error}")
        return 1
    except (KubectlFailed, LocalFailed, TimeoutError) as error:
        say(f"the demo could not go on: {error}")
        return 1
    say("all of it was seen to happen")
    return 0


if __name__ == "__main__":
    sys.exit(main())
