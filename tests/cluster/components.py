"""The components: their configuration files and command lines."""
import json

from place import NAME, NODE, NODE_IP, PAUSE, POD_NET, SERVICE_NET, STATE

CONF, PKI = STATE / "conf", STATE / "pki"


def write_config() -> None:
    kubelet = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
        "address": NODE_IP,
        "authentication": {"anonymous": {"enabled": False}, "webhook": {"enabled": True},
                           "x509": {"clientCAFile": f"{PKI}/ca.crt"}},
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": f"{PKI}/kubelet-server.crt", "tlsPrivateKeyFile": f"{PKI}/kubelet-server.key",
        "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
        # cgroup v1 without systemd; all pods under one cgroup of this cluster's own
        "cgroupDriver": "cgroupfs", "cgroupRoot": f"/{NAME}", "failCgroupV1": False, "enforceNodeAllocatable": [],
        "clusterDNS": [NODE_IP], "clusterDomain": "cluster.local", "resolvConf": f"{CONF}/resolv.conf",
        "failSwapOn": False,
        # a busy disk or a full image store is the machine's matter, not the tests'
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1Gi", "imagefs.available": "1Gi"},
        "imageGCHighThresholdPercent": 100,
        "volumePluginDir": f"{STATE}/kubelet/volume-plugins",
    }
    proxy = {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration",
        "clientConnection": {"kubeconfig": f"{CONF}/proxy.conf"}, "hostnameOverride": NODE, "mode": "iptables",
        "clusterCIDR": POD_NET, "healthzBindAddress": "127.0.0.1:10256", "metricsBindAddress": "127.0.0.1:10249",
        # these are the whole machine's, and may not be writable here
        "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
    }
    bridge = {"type": "bridge", "bridge": "pods0", "isGateway": True, "ipMasq": False, "hairpinMode": True,
              "ipam": {"type": "host-local", "ranges": [[{"subnet": POD_NET}]], "routes": [{"dst": "0.0.0.0/0"}]}}
    pods = {"cniVersion": "0.4.0", "name": "pods",
            "plugins": [bridge, {"type": "portmap", "capabilities": {"portMappings": True}}]}
    (CONF / "kubelet.json").write_text(json.dumps(kubelet, indent=1))
    (CONF / "resolv.conf").write_text("")
    (CONF / "proxy.json").write_text(json.dumps(proxy, indent=1))
    (CONF / "Corefile").write_text(COREFILE)
    (CONF / "containerd.toml").write_text(CONTAINERD)
    (STATE / "cni").mkdir()
    (STATE / "cni" / "pods.conflist").write_text(json.dumps(pods, indent=1))


COREFILE = f""".:53 {{
    errors
    ready 127.0.0.1:8181
    kubernetes cluster.local in-addr.arpa {{
        kubeconfig {CONF}/dns.conf
        ttl 1
    }}
    template ANY ANY {{
        rcode NXDOMAIN
    }}
}}
"""

# Without restrict_oom_score_adj runc dies where oom_score_adj may not be lowered, and says no more than that it can't
# get its final child's PID from a pipe.
CONTAINERD = f"""version = 2
disabled_plugins = ["io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.btrfs", \
"io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.zfs", "io.containerd.tracing.processor.v1.otlp"]
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE}"
  restrict_oom_score_adj = true
  netns_mounts_under_state_dir = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{STATE}/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
"""

COMMANDS: dict[str, list[str]] = {
    "etcd": [
        "etcd", f"--data-dir={STATE}/etcd", "--unsafe-no-fsync", "--log-level=warn",
        "--listen-client-urls=http://127.0.0.1:2379", "--advertise-client-urls=http://127.0.0.1:2379",
        "--listen-peer-urls=http://127.0.0.1:2380"],
    "containerd": ["containerd", "-c", f"{CONF}/containerd.toml"],
    "apiserver": [
        "kube-apiserver", "--etcd-servers=http://127.0.0.1:2379", "--secure-port=6443",
        f"--advertise-address={NODE_IP}", f"--service-cluster-ip-range={SERVICE_NET}",
        "--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction", "--allow-privileged",
        f"--client-ca-file={PKI}/ca.crt", f"--tls-cert-file={PKI}/apiserver.crt",
        f"--tls-private-key-file={PKI}/apiserver.key",
        # exec, logs and port-forward: the API server calls the kubelet by IP, with a client certificate
        "--kubelet-preferred-address-types=InternalIP", f"--kubelet-client-certificate={PKI}/admin.crt",
        f"--kubelet-client-key={PKI}/admin.key", f"--kubelet-certificate-authority={PKI}/ca.crt",
        f"--service-account-key-file={PKI}/sa.pub", f"--service-account-signing-key-file={PKI}/sa.key",
        "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
        f"--requestheader-client-ca-file={PKI}/front-proxy-ca.crt", "--requestheader-allowed-names=front-proxy",
        "--requestheader-username-headers=X-Remote-User", "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        f"--proxy-client-cert-file={PKI}/front-proxy.crt", f"--proxy-client-key-file={PKI}/front-proxy.key"],
    "controller-manager": [
        "kube-controller-manager", f"--kubeconfig={CONF}/controller-manager.conf", "--leader-elect=false",
        "--bind-address=127.0.0.1", "--use-service-account-credentials", f"--root-ca-file={PKI}/ca.crt",
        f"--service-account-private-key-file={PKI}/sa.key", f"--cluster-signing-cert-file={PKI}/ca.crt",
        f"--cluster-signing-key-file={PKI}/ca.key",
        "--kube-api-qps=1000", "--kube-api-burst=2000",  # at the default of 20 it alone takes 5 s to start
        "--pvclaimbinder-sync-period=1s"],  # a claim that comes before its volume else waits up to 15 s
    "scheduler": [
        "kube-scheduler", f"--kubeconfig={CONF}/scheduler.conf", "--leader-elect=false", "--bind-address=127.0.0.1"],
    "kubelet": [
        "kubelet", f"--config={CONF}/kubelet.json", f"--kubeconfig={CONF}/kubelet.conf",
        f"--hostname-override={NODE}", f"--node-ip={NODE_IP}"],
    "proxy": ["kube-proxy", f"--config={CONF}/proxy.json"],
    "dns": ["coredns", "-conf", f"{CONF}/Corefile"],
}
