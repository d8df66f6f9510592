"""Container images: built by buildah from Debian alone, copied to the node by hand, since nothing can be pulled."""
import json
import os
import shlex
import shutil
import subprocess
import time
from pathlib import Path

from place import STATE, Failure, run, say
from processes import enter

SUITE = "trixie"
PRUNED = ["usr/share/doc", "usr/share/man", "usr/share/locale", "usr/lib/libtorch-test", "var/cache/apt",
          "var/lib/apt/lists", "var/log"]  # a fifth of an image; its files have to be copied to every new cluster
STORE = {"STORAGE_DRIVER": "overlay", "BUILDAH_ISOLATION": "chroot"}  # what buildah needs inside a container


def buildah(*args: object) -> str:
    return run("buildah", *args, env={**os.environ, **STORE})


def image_id(tag: str) -> str:
    """The id of an image in buildah's store, or nothing."""
    try:
        return buildah("inspect", "--type", "image", "--format", "{{.FromImageID}}", tag).strip()
    except Failure:
        return ""


def debian_mirror() -> str:
    """The mirror that this machine's apt uses for Debian itself; it stays out of the image."""
    lines = run("apt-get", "indextargets", "--format", "$(ORIGIN) $(COMPONENT) $(REPO_URI)", "Created-By: Packages")
    for line in lines.splitlines():
        if line.startswith("Debian main ") and "security" not in line:
            return line.split()[2]
    raise Failure("apt knows no Debian mirror; run apt-get update")


def base(tag: str, *packages: str) -> None:
    wanted = " ".join([SUITE, *sorted(packages), "without", *PRUNED])
    if image_id(tag) and wanted in buildah("inspect", "--type", "image", tag):
        return say(f"{tag}: exists")
    say(f"{tag}: installing Debian {SUITE} with {' '.join(packages) or 'nothing more'}")
    begun = time.monotonic()
    box = buildah("from", "scratch").split()[-1]
    try:
        root = Path(buildah("mount", box).split()[-1])
        include = [f"--include={','.join(packages)}"] if packages else []
        try:
            run("debootstrap", "--variant=minbase", *include, SUITE, root, debian_mirror())
        except Failure as error:
            log = root / "debootstrap" / "debootstrap.log"
            raise Failure(f"{error}\n" + (log.read_text(errors="replace")[-2000:] if log.exists() else "")) from error
        for entry in [entry for path in PRUNED if (root / path).is_dir() for entry in (root / path).iterdir()]:
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
        for path in ("etc/apt/sources.list", "etc/resolv.conf", "etc/hostname"):  # this machine's
            (root / path).write_text("")
        buildah("umount", box)
        buildah("config", "--env", "LANG=C.UTF-8", "--cmd", '["bash"]', "--label", f"kvsteward={wanted}", box)
        buildah("commit", "-q", box, tag)
    finally:
        buildah("rm", box)
    say(f"{tag}: built in {time.monotonic() - begun:.0f} s")


def image(tag: str, folder: str, *args: str) -> None:
    """Build folder/Dockerfile. Steps that run pip need this machine's certificates; chroot isolation gives them its
    network."""
    certs = "/etc/ssl/certs/ca-certificates.crt"
    mount = ["-v", f"{certs}:{certs}:ro"] if Path(certs).exists() else []
    argv = ["buildah", "bud", "--layers", "--pull-never", *mount, "-t", tag, *args, folder]
    if subprocess.run(argv, env={**os.environ, **STORE}, check=False).returncode:
        raise Failure(f"{shlex.join(argv)} failed")


def load(*names: str) -> None:
    known = STATE / "loaded.json"  # {image: id of what the node has}
    for name in names:
        enter()  # fails before the copying if the cluster is down
        begun = time.monotonic()
        loaded = json.loads(known.read_text()) if known.exists() else {}
        if name.endswith(".tar"):
            run(*enter("ctr", "-n", "k8s.io", "images", "import", Path(name).absolute()))
        else:
            ident = image_id(name)
            if not ident:
                raise Failure(f"no image {name} in buildah's store; run: make images")
            if loaded.get(name) == ident:
                say(f"{name}: already loaded")
                continue
            archive = STATE / "load.tar"
            archive.unlink(missing_ok=True)
            try:
                buildah("push", "-q", name, f"docker-archive:{archive}:{name}")
                run(*enter("ctr", "-n", "k8s.io", "images", "import", archive))
            finally:
                archive.unlink(missing_ok=True)
            known.write_text(json.dumps({**loaded, name: ident}, indent=1))
        say(f"{name}: loaded in {time.monotonic() - begun:.1f} s")
