"""What the cluster is made of: Debian's packages, the programs built from modules/, and the pause image."""
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from images import buildah
from place import CACHE, KIT, KUBECONFIG, PAUSE, Failure, run, say

DEPS = ["buildah", "ca-certificates", "containerd", "containernetworking-plugins", "debootstrap", "gcc",
        "iproute2", "iptables", "libc6-dev", "openssl", "procps", "runc", "util-linux"]
PROGRAMS = {"kubernetes": "k8s.io/kubernetes", "etcd": "go.etcd.io/etcd/server/v3", "helm": "helm.sh/helm/v3",
            "coredns": "github.com/coredns/coredns"}


def unfit() -> str:
    """Why this machine can't host the cluster, or nothing."""
    if os.geteuid():
        return "the one-node cluster needs root, for namespaces and cgroups of its own"
    if not Path("/etc/debian_version").exists() or not shutil.which("apt-get"):
        return "the one-node cluster needs Debian, for its containerd, runc and buildah packages"
    if not shutil.which("go"):
        return "the one-node cluster needs the go command in PATH, to build Kubernetes"
    return ""


def deps() -> None:
    if reason := unfit():
        raise Failure(reason)
    state = subprocess.run(["dpkg-query", "-W", "-f", "${Package} ${db:Status-Status}\n", *DEPS], text=True,
                           stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False).stdout
    missing = sorted(set(DEPS) - {line.split()[0] for line in state.splitlines() if line.endswith(" installed")})
    if missing:
        say("installing " + " ".join(missing))
        env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        run("apt-get", "update", env=env)
        run("apt-get", "install", "-y", "--no-install-recommends", *missing, env=env)
    say("packages installed")


def pinned(module: str) -> str:
    """The version of a Go module in its go.mod: the one place that pins it."""
    for mod in KIT.glob("modules/*/go.mod"):
        if found := re.search(rf"^(?:require)?\s*{re.escape(module)} (v\S+)", mod.read_text(), re.MULTILINE):
            return found[1]
    raise Failure(f"{module} is in no modules/*/go.mod")


def folder(program: str) -> Path:
    """Where a program is kept: another pin or another hash in modules/ is another folder."""
    files = b"".join(file.read_bytes() for file in sorted((KIT / "modules" / program).iterdir()))
    return CACHE / f"{program}-{pinned(PROGRAMS[program])}-{hashlib.sha256(files).hexdigest()[:8]}"


def missing() -> list[Path]:
    return [folder(program) for program in PROGRAMS if not folder(program).is_dir()]


def environment() -> dict[str, str]:
    """The environment of commands against the cluster."""
    path = [str(folder(program)) for program in PROGRAMS] + [os.environ.get("PATH", "")]
    return {**os.environ, "PATH": ":".join(path), "KUBECONFIG": str(KUBECONFIG)}


def build_arguments(program: str) -> list[str]:
    version = pinned(PROGRAMS[program])
    if program == "kubernetes":
        major, minor = version[1:].split(".")[:2]
        # Without its version, Kubernetes says v0.0.0 and the components refuse each other.
        stamp = " ".join(f"-X {package}.{key}={value}"
                         for package in ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
                         for key, value in (("gitVersion", version), ("gitMajor", major), ("gitMinor", minor)))
        return ["-ldflags", f"-s -w {stamp}", "tool"]
    if program == "helm":
        return ["-ldflags", f"-s -w -X helm.sh/helm/v3/internal/version.version={version}", "helm.sh/helm/v3/cmd/helm"]
    return ["-ldflags", "-s -w", "." if program == "coredns" else PROGRAMS[program]]


def build() -> None:
    for program in PROGRAMS:
        out = folder(program)
        if out.is_dir():
            say(f"{out.name}: cached")
            continue
        say(f"{out.name}: building (minutes, the first time)")
        begun = time.monotonic()
        part = Path(tempfile.mkdtemp(prefix=f"{out.name}.", dir=CACHE))
        part.chmod(0o755)
        # all of Kubernetes' commands by their own names; of the others the only one, by its module's
        target = f"{part}/" if program == "kubernetes" else part / program
        try:
            run("go", "build", "-trimpath", "-buildvcs=false", "-o", target, *build_arguments(program),
                cwd=KIT / "modules" / program, env={**os.environ, "CGO_ENABLED": "0"})
            part.rename(out)
        finally:
            shutil.rmtree(part, ignore_errors=True)
        say(f"{out.name}: built in {time.monotonic() - begun:.0f} s")
    if not pause_archive().exists():
        build_pause()


def pause_archive() -> Path:
    return CACHE / f"pause-{hashlib.sha256(PAUSE.encode() + (KIT / 'pause.c').read_bytes()).hexdigest()[:8]}.tar"


def build_pause() -> None:
    """The image of every pod's first container, as a docker-archive: one static program in one layer."""
    with tempfile.TemporaryDirectory(dir=CACHE) as tmp:
        run("gcc", "-static", "-Os", "-s", "-o", f"{tmp}/pause", KIT / "pause.c")
        Path(tmp, "Dockerfile").write_text('FROM scratch\nCOPY pause /pause\nENTRYPOINT ["/pause"]\n')
        buildah("bud", "-q", "-t", PAUSE, tmp)
        buildah("push", "-q", PAUSE, f"docker-archive:{tmp}/pause.tar:{PAUSE}")
        buildah("rmi", PAUSE)
        Path(tmp, "pause.tar").rename(pause_archive())
    say("pause image: built")
