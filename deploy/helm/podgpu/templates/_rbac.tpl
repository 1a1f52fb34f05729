{{/* Roles with the permissions that the enabled features need. */}}

{{/* (list root component api): read pods and DRA devices in the cluster, and one ConfigMap in its namespace. */}}
{{- define "podgpu.nodeAgentRoles" -}}
{{- $root := index . 0 -}}
{{- $place := list $root (index . 1) -}}
{{- $api := index . 2 -}}
{{- if or $api.pods $api.slices }}
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata:
  name: {{ include "podgpu.clusterWide" $place }}
  labels:
    {{- include "podgpu.labels" $place | nindent 4 }}
rules:
  {{- if $api.pods }}
  # podgpu requests only the pods of its node. RBAC cannot restrict this.
  - {apiGroups: [""], resources: [pods], verbs: [list, watch]}
  {{- end }}
  {{- if $api.slices }}
  - {apiGroups: [resource.k8s.io], resources: [resourceslices], verbs: [list, watch]}
  # podgpu gets each claim that containers of its node use, to find claims with adminAccess and shares.
  - {apiGroups: [resource.k8s.io], resources: [resourceclaims], verbs: [get]}
  - {nonResourceURLs: [/apis/resource.k8s.io], verbs: [get]}
  {{- end }}
---
{{ include "podgpu.clusterRoleBinding" $place }}
{{- end }}
{{- with $api.configMap }}
{{- $parts := splitList ":" . }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata:
  name: {{ include "podgpu.component" (list $root "counters") }}
  namespace: {{ index $parts 0 }}
  labels:
    {{- include "podgpu.labels" $place | nindent 4 }}
rules:
  - {apiGroups: [""], resources: [configmaps], resourceNames: [{{ index $parts 1 }}], verbs: [list, watch]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata:
  name: {{ include "podgpu.component" (list $root "counters") }}
  namespace: {{ index $parts 0 }}
  labels:
    {{- include "podgpu.labels" $place | nindent 4 }}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: {{ include "podgpu.component" (list $root "counters") }}}
subjects:
  - {{ include "podgpu.subject" $place | indent 4 | trim }}
{{- end }}
{{- end -}}

{{/* The ClusterRole of one entry of exporter.write, and its binding: (list root writer). */}}
{{- define "podgpu.exporter.writerRole" -}}
{{- $place := list (index . 0) "exporter" -}}
{{- $name := printf "%s-write-%s" (include "podgpu.clusterWide" $place) (index . 1) -}}
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata:
  name: {{ $name }}
  labels:
    {{- include "podgpu.labels" $place | nindent 4 }}
rules:
  {{- include "podgpu.exporter.writerRules" (index . 1) | nindent 2 }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata:
  name: {{ $name }}
  labels:
    {{- include "podgpu.labels" $place | nindent 4 }}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: {{ $name }}}
subjects:
  - {{ include "podgpu.subject" $place | indent 4 | trim }}
{{- end -}}

{{- define "podgpu.subject" -}}
kind: ServiceAccount
name: {{ include "podgpu.component" . }}
namespace: {{ (index . 0).Release.Namespace }}
{{- end -}}

{{- define "podgpu.clusterRoleBinding" -}}
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata:
  name: {{ include "podgpu.clusterWide" . }}
  labels:
    {{- include "podgpu.labels" . | nindent 4 }}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: {{ include "podgpu.clusterWide" . }}}
subjects:
  - {{ include "podgpu.subject" . | indent 4 | trim }}
{{- end -}}
