"""up, status, down."""
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import node
from binaries import build_pause, environment, missing, pause_archive
from components import COMMANDS, write_config
from keys import write_keys
from place import KUBECONFIG, MARK, NODE, PAUSE, STATE, Failure, run, say, works
from processes import alive, background, enter, in_network, present, wait

READY = 'jsonpath={.status.conditions[?(@.type=="Ready")].status}'
DNS_READY = "import urllib.request as r; r.urlopen('http://127.0.0.1:8181/ready')"


def kubectl(*args: str) -> str | None:
    """What kubectl prints, or None when it fails."""
    done = subprocess.run(in_network("kubectl", *args), text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                          env=environment(), check=False)
    return done.stdout if done.returncode == 0 else None


def up() -> None:
    begun = time.monotonic()
    if lacking := missing():
        raise Failure(f"no {lacking[0]}; run: {sys.argv[0]} build")
    if not pause_archive().exists():
        build_pause()
    if MARK.exists() and not (alive("init") and json.loads(MARK.read_text()).get("complete")):
        say("a cluster that was not taken down, or did not get far, is in the way; removing it")
        down()
    if not MARK.exists():
        if STATE.exists() and any(STATE.iterdir()):
            raise Failure(f"{STATE} has something else in it; set CLUSTER_STATE to another folder")
        for folder in ("conf", "logs", "pids"):
            (STATE / folder).mkdir(parents=True, exist_ok=True)
        MARK.write_text("{}")
        write_keys()
        write_config()
        node.create()
    if all(alive(name) for name in COMMANDS):
        return say(f"up already: {KUBECONFIG}")

    start("etcd", "apiserver", "containerd")
    wait("containerd", lambda: works(enter("ctr", "version")), "containerd")
    if PAUSE not in run(*enter("ctr", "-n", "k8s.io", "images", "ls", "-q")).split():
        run(*enter("ctr", "-n", "k8s.io", "images", "import", pause_archive()))
    wait("API server", lambda: kubectl("get", "--raw", "/readyz"), "etcd", "apiserver")
    start("controller-manager", "scheduler", "kubelet", "proxy", "dns")
    wait("node", lambda: kubectl("get", "node", NODE, "-o", READY) == "True", "containerd", "kubelet")
    # pods need their namespace's service account, and the kubelet the CA's ConfigMap
    wait("service accounts", lambda: kubectl("get", "serviceaccount/default", "configmap/kube-root-ca.crt"),
         "controller-manager")
    wait("service network", lambda: works(in_network("sh", "-c", "iptables -t nat -S | grep -q default/kubernetes")),
         "proxy")
    wait("cluster DNS", lambda: works(in_network(sys.executable, "-c", DNS_READY)), "dns")
    return say(f"up in {time.monotonic() - begun:.1f} s: {KUBECONFIG}")


def start(*names: str) -> None:
    for name in names:
        if not alive(name):
            background(name, enter(*COMMANDS[name]), env={"PATH": environment()["PATH"], "HOME": "/root"})


def status() -> int:
    if not MARK.exists():
        say(f"down (nothing in {STATE})")
        return 1
    total, dead = 0.0, []
    for name in ["init", *COMMANDS]:
        if pid := alive(name):
            found = re.search(r"VmRSS:\s*(\d+)", Path(f"/proc/{pid}/status").read_text())
            rss = int(found[1]) / 1024 if found else 0.0
            total += rss
            print(f"{name:20} pid {pid:<8} {rss:5.0f} MiB")
        else:
            dead.append(name)
            print(f"{name:20} dead; its log: {STATE}/logs/{name}.log")
    print(f"{'total':33} {total:5.0f} MiB")
    if "init" not in dead:
        shown = kubectl("get", "node", NODE, "-o", "wide", "--request-timeout=3s")  # without etcd it would hang
        print(shown or "the API server does not answer\n", end="")
    return 1 if dead else 0


def down() -> None:
    """Kill the recorded processes, init first (the kernel then ends what is in its pid namespace, pods too)."""
    begun = time.monotonic()
    if not MARK.exists():
        return say(f"down already (nothing in {STATE})")
    init = alive("init")
    network = os.stat(f"/proc/{init}/ns/net").st_ino if init else 0
    recorded = [entry.name for entry in (STATE / "pids").iterdir()]
    for name in sorted(recorded, key=lambda name: name != "init"):
        if pid := present(name):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
    end = time.monotonic() + 15
    while left := [name for name in recorded if present(name)]:
        if time.monotonic() > end:
            raise Failure(f"still running after SIGKILL: {' '.join(left)}")
        time.sleep(0.02)
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        if line.split()[4].startswith(f"{STATE}/"):
            raise Failure(f"something is mounted on {line.split()[4]}; unmount it, then run cluster down again")
    node.restore()
    run("rm", "-rf", "--one-file-system", STATE)
    name_strays(network)
    return say(f"down in {time.monotonic() - begun:.1f} s")


def name_strays(network: int) -> None:
    """Say what `cluster exec` started and still runs; it is not ours to end."""
    for pid in [entry for entry in os.listdir("/proc") if entry.isdigit()] if network else []:
        try:
            if os.stat(f"/proc/{pid}/ns/net").st_ino == network:
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                say(f"note: pid {pid}, started with `cluster exec`, still runs: {command[:100]}")
        except OSError:
            pass
