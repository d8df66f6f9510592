"""What `helm test` runs: is the CRD served, is the operator alive?"""
import json
import ssl
import sys
import urllib.error
import urllib.request
from pathlib import Path

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")

token = (ACCOUNT / "token").read_text()
discovery = urllib.request.Request(
    "https://kubernetes.default.svc/apis/kvsteward.dev/v1alpha1", headers={"Authorization": f"Bearer {token}"}
)
tls = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
try:
    served = json.load(urllib.request.urlopen(discovery, timeout=10, context=tls))["resources"]
except urllib.error.HTTPError as error:
    sys.exit(f"the CRD is not served ({error.code}); run: kubectl apply -f crds/")
names = {resource["name"] for resource in served}
if not {"kvcachepolicies", "kvcachepolicies/status", "kvcachepolicies/scale"} <= names:
    sys.exit(f"the CRD serves {sorted(names)} only; run: kubectl apply -f crds/")
print("the CRD is served")

urllib.request.urlopen(f"http://{sys.argv[1]}:8080/healthz", timeout=10)
print("the operator is alive")
