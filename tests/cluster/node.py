"""The node: namespaces, mounts, network and cgroups, made so that killing one process takes them all away."""
import json
import os
import re
import shlex
import time
from pathlib import Path

from place import MARK, NAME, NODE_IP, STATE, Failure, run, works
from processes import alive, background, enter, wait

# Folders that the node's programs write to, some whatever their options say, each with the folder in STATE that is
# mounted there. The mounts exist only in the cluster's mount namespace, so nothing is left on the host.
MOUNTS = {"/run/containerd": "run-containerd", "/var/lib/containerd": "containerd", "/var/lib/cni": "cni-state",
          "/var/lib/kubelet": "kubelet", "/var/log/containers": "container-links", "/var/log/pods": "pod-logs"}
# Images are kept in memory where there is plenty: on disk, loading and removing them takes up to a minute each.
IMAGES, IMAGES_GIB, ROOMY = "/var/lib/containerd", 8, 12 << 30
# The kubelet sets these for the whole machine; `restore` puts them back.
SYSCTLS = ["vm/overcommit_memory", "vm/panic_on_oom", "kernel/panic", "kernel/panic_on_oops",
           "kernel/keys/root_maxkeys", "kernel/keys/root_maxbytes"]


def create() -> None:
    """One process holds the network, mount and pid namespaces; killing it kills every process in them, and the
    mounts and interfaces go with the last one. With SIGCHLD ignored the kernel reaps its orphans."""
    created = [str(folder) for target in MOUNTS for folder in [Path(target), *Path(target).parents]
               if not folder.exists() or mounted(folder)]
    sysctls = {name: file.read_text().strip() for name in SYSCTLS if (file := Path("/proc/sys", name)).exists()}
    # What is missing in the mark tells `down` and a next `up` how far this one got.
    MARK.write_text(json.dumps({"created": created, "sysctls": sysctls}, indent=1))
    for target, source in MOUNTS.items():
        (STATE / source).mkdir()
        Path(target).mkdir(parents=True, exist_ok=True)
    for controller in cgroups():
        (controller / NAME).mkdir(exist_ok=True)
    background("init", ["unshare", "--net", "--mount", "--pid", "--fork", "--mount-proc", "--propagation", "slave",
                        "sh", "-c", "trap '' CHLD; exec sleep infinity"], cwd="/")
    wait("namespaces", lambda: works(["grep", "-qx", "sleep", f"/proc/{alive('init')}/comm"]), "init", timeout=5)
    mounts = [["mount", "--bind", str(STATE / source), target] for target, source in MOUNTS.items()]
    if memory_available() > ROOMY:
        mounts.append(["mount", "-t", "tmpfs", "-o", f"size={IMAGES_GIB}g", "images", IMAGES])
    commands = "\n".join(shlex.join(mount) for mount in mounts)
    # A veth pair with both ends here is the node's interface: not every kernel has the dummy type. The default
    # route lets the node itself reach service addresses; anything else it would reach does not answer.
    run(*enter("sh", "-euc", f"""
mount --make-rshared /
{commands}
ip link set lo up
ip link add node0 type veth peer name node0p
ip addr add {NODE_IP}/24 dev node0
ip link set node0p up
ip link set node0 up
ip route add default dev node0 src {NODE_IP}
sysctl -qw net.ipv4.ip_forward=1
"""))
    MARK.write_text(json.dumps({"created": created, "sysctls": sysctls, "complete": True}, indent=1))


def restore() -> None:
    """Put back what create() and the kubelet changed outside of STATE, once every process is gone."""
    saved = json.loads(MARK.read_text())
    for name, value in saved.get("sysctls", {}).items():
        if Path("/proc/sys", name).read_text().strip() != value:
            Path("/proc/sys", name).write_text(value)
    for controller in cgroups():
        remove_cgroup(controller / NAME)
    for folder in sorted(saved.get("created", []), reverse=True):
        try:
            if not mounted(Path(folder)):
                os.rmdir(folder)
        except OSError:
            pass  # something else uses it by now


def memory_available() -> int:
    """Bytes that the kernel could hand out without swapping."""
    found = re.search(r"MemAvailable:\s*(\d+) kB", Path("/proc/meminfo").read_text())
    return int(found[1]) << 10 if found else 0


def mounted(folder: Path) -> bool:
    """Whether a cluster has a folder of its own mounted there: removing it would detach that mount."""
    for namespace in Path("/proc").glob("[0-9]*/mountinfo"):
        try:
            if str(folder) in MOUNTS and f" {folder} " in namespace.read_text():
                return True
        except OSError:
            pass
    return False


def cgroups() -> list[Path]:
    """The root of every cgroup hierarchy: the one of cgroup v2, or those of v1 and the empty v2 beside them."""
    root = Path("/sys/fs/cgroup")
    if (root / "cgroup.controllers").exists():
        return [root]
    return [entry for entry in root.iterdir() if entry.is_dir() and not entry.is_symlink()]


def remove_cgroup(top: Path) -> None:
    """Processes killed a moment ago may still be leaving."""
    end = time.monotonic() + 10
    while top.exists():
        for folder, _, _ in os.walk(top, topdown=False):
            try:
                os.rmdir(folder)
            except OSError:
                pass
        if time.monotonic() > end:
            raise Failure(f"the cgroup {top} is still in use (see the cgroup.procs files in it)")
        if top.exists():
            time.sleep(0.05)
