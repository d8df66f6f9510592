{{/* Name of the namespaced objects: the release's, with the chart's in it. */}}
{{- define "kvsteward.name" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{ .Release.Name | trunc 45 | trimSuffix "-" }}
{{- else -}}
{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 45 | trimSuffix "-" }}
{{- end -}}
{{- end }}

{{/* Name of the cluster's objects: releases of one name in two namespaces don't meet. */}}
{{- define "kvsteward.clusterName" -}}
{{ include "kvsteward.name" . }}-{{ .Release.Namespace }}
{{- end }}

{{- define "kvsteward.keySecret" -}}
{{ .Values.operatorKey.secret | default (printf "%s-operator-key" (include "kvsteward.name" .)) }}
{{- end }}

{{- define "kvsteward.selector" -}}
app.kubernetes.io/name: kvsteward-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "kvsteward.labels" -}}
{{ include "kvsteward.selector" . }}
app.kubernetes.io/component: operator
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{/* What every pod here is held to: the Pod Security standard "restricted", and no more. */}}
{{- define "kvsteward.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "kvsteward.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{/* What one namespace's policies need. The API server lets the operator give a sidecar's Role only what it has. */}}
{{- define "kvsteward.rules" -}}
- apiGroups: [kvsteward.dev]
  resources: [kvcachepolicies]
  verbs: [get, list, watch]
- apiGroups: [kvsteward.dev]
  resources: [kvcachepolicies/status]
  verbs: [get, patch]
- apiGroups: [apps]
  resources: [deployments]
  verbs: [get, list, watch, create, patch]
- apiGroups: [apps]
  resources: [controllerrevisions]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [apps]
  resources: [replicasets]
  verbs: [get, list, watch]
- apiGroups: [""]
  resources: [configmaps]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [services, serviceaccounts]
  verbs: [get, list, watch, create, patch]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch]
- apiGroups: [""]
  resources: [secrets]  # made once, never read
  verbs: [create]
- apiGroups: [""]
  resources: [events]
  verbs: [create]
- apiGroups: [rbac.authorization.k8s.io]
  resources: [roles, rolebindings]
  verbs: [get, list, watch, create, patch]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch]
{{- end }}
