"""Names that two parts must spell alike: ports, headers, routes, files, labels."""

GROUP = "kvsteward.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "KVCachePolicy"
PLURAL = "kvcachepolicies"
SHORT_NAME = "kvcp"

TRAFFIC_PORT = 8080
ADMIN_PORT = 9901
DRAIN_PORT = 9902  # loopback only
ENGINE_PORT = 8000  # loopback only

# Sidecar -> engine, engine -> sidecar. Never accepted from, or shown to, a client.
DIRECTIVE_HEADER = "X-KV-Directive"
OUTCOME_HEADER = "X-KV-Outcome"
OUTCOME_COMMENT = b": kv-outcome "  # an SSE comment event of its own, directly before `data: [DONE]`

# Client <-> sidecar.
RECEIPT_HEADER = "X-KV-Receipt"
SESSION_HEADER = "X-KV-Session"
WORKLOAD_HEADER = "X-KV-Workload"
TENANT_HEADER = "X-KV-Tenant"
GATEWAY_TOKEN_HEADER = "X-KV-Gateway-Token"

ENGINE_POLICY_ROUTE = "/kv/v1/policy"
ENGINE_STATS_ROUTE = "/kv/v1/stats"
ENGINE_LEDGER_ROUTE = "/kv/v1/ledger"
ENGINE_OUTCOMES_ROUTE = "/kv/v1/outcomes"  # /{request}
ENGINE_DRAIN_ROUTE = "/kv/v1/drain"

ENGINE_TOKEN_FILE = "engine-token"  # in the shared run folder
LATCH_FILE = "latch.json"

DOCUMENT_KEY = "document"  # ConfigMap data keys
VERSION_KEY = "version"
SALT_KEY = "salt"  # Secret data keys
ADMIN_TOKEN_KEY = "admin-token"
GATEWAY_SECRET_KEY = "token"

POLICY_LABEL = f"{GROUP}/policy"
GENERATION_LABEL = f"{GROUP}/generation"
