{{/* Names and labels of every object. */}}

{{- define "podgpu.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{/* Leaves room for suffixes such as -exporter within 63 characters. */}}
{{- define "podgpu.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 44 | trimSuffix "-" -}}
{{- else if contains (include "podgpu.name" .) .Release.Name -}}
{{- .Release.Name | trunc 44 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "podgpu.name" .) | trunc 44 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* Name of a component's objects: (list root component) */}}
{{- define "podgpu.component" -}}
{{- printf "%s-%s" (include "podgpu.fullname" (index . 0)) (index . 1) -}}
{{- end -}}

{{/* Name of a cluster-scoped object. Contains the namespace, so that releases with the same name do not conflict. */}}
{{- define "podgpu.clusterWide" -}}
{{- printf "%s-%s" (index . 0).Release.Namespace (include "podgpu.component" .) -}}
{{- end -}}

{{- define "podgpu.selectorLabels" -}}
app.kubernetes.io/name: {{ include "podgpu.name" (index . 0) }}
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{- define "podgpu.labels" -}}
{{- $root := index . 0 -}}
{{ include "podgpu.selectorLabels" . }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: podgpu
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" }}
{{- with $root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Labels of pods. They exclude the chart's version, because a new version would restart the pods. */}}
{{- define "podgpu.podLabels" -}}
{{ include "podgpu.selectorLabels" . }}
{{- with merge (deepCopy (index . 0).Values.podLabels) (index . 0).Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "podgpu.metadata" -}}
name: {{ include "podgpu.component" . }}
namespace: {{ (index . 0).Release.Namespace }}
labels:
  {{- include "podgpu.labels" . | nindent 2 }}
{{- end -}}

{{/* Does not mount a token. Pods that need one mount it themselves. */}}
{{- define "podgpu.serviceAccount" -}}
apiVersion: v1
kind: ServiceAccount
metadata:
  {{- include "podgpu.metadata" . | nindent 2 }}
automountServiceAccountToken: false
{{- end -}}

{{- define "podgpu.image" -}}
{{- $tag := default .Chart.AppVersion .Values.image.tag -}}
{{- if .Values.image.digest -}}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest -}}
{{- else -}}
{{- printf "%s:%s" .Values.image.repository $tag -}}
{{- end -}}
{{- end -}}

{{/* The image with gRPC, for autoscale and demo. */}}
{{- define "podgpu.autoscaleImage" -}}
{{- $tag := default .Chart.AppVersion .Values.image.tag -}}
{{- if .Values.image.autoscaleDigest -}}
{{- printf "%s@%s" .Values.image.repository .Values.image.autoscaleDigest -}}
{{- else if .Values.image.digest -}}
{{- fail "image.digest is set, but autoscale and demo use another image: set image.autoscaleDigest too" -}}
{{- else -}}
{{- printf "%s:%s-autoscale" .Values.image.repository $tag -}}
{{- end -}}
{{- end -}}

{{/* (list root switch): returns "true" or "". `auto` is true if the cluster has the Prometheus operator. */}}
{{- define "podgpu.on" -}}
{{- $switch := index . 1 | toString -}}
{{- if or (eq $switch "true") (and (eq $switch "auto") ((index . 0).Capabilities.APIVersions.Has "monitoring.coreos.com/v1")) -}}
true
{{- end -}}
{{- end -}}
