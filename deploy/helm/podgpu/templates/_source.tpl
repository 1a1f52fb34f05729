{{/* The source of metrics for `podgpu cluster` and `podgpu autoscale`. */}}

{{/* True if exporters are discovered through the API server. */}}
{{- define "podgpu.source.discovers" -}}
{{- if not .Values.source.prometheus.url -}} true {{- end -}}
{{- end -}}

{{/* The label selector of the exporters. EndpointSlices have the labels of their Service. */}}
{{- define "podgpu.source.selector" -}}
{{- $discover := .Values.source.discover -}}
{{- $ours := printf "app.kubernetes.io/name=%s,app.kubernetes.io/instance=%s,app.kubernetes.io/component=exporter" (include "podgpu.name" .) .Release.Name -}}
{{- $selector := default $ours $discover.selector -}}
{{- if $discover.allNamespaces -}}{{ printf "/%s" $selector }}
{{- else -}}{{ printf "%s/%s" (default .Release.Namespace $discover.namespace) $selector }}{{- end -}}
{{- end -}}

{{/* Flags for TLS and credentials: (list prefix directory access). */}}
{{- define "podgpu.source.access" -}}
{{- $prefix := index . 0 -}}
{{- $directory := index . 1 -}}
{{- with index . 2 -}}
{{- if .username }}
- {{ printf "--%s-username=%s" $prefix .username | quote }}
{{- end }}
{{- if .secret.passwordKey }}
- {{ printf "--%s-password-file=%s/%s" $prefix $directory .secret.passwordKey | quote }}
{{- end }}
{{- if .secret.tokenKey }}
- {{ printf "--%s-token-file=%s/%s" $prefix $directory .secret.tokenKey | quote }}
{{- end }}
{{- if .secret.caKey }}
- {{ printf "--%s-ca-file=%s/%s" $prefix $directory .secret.caKey | quote }}
{{- end }}
{{- if .insecureSkipVerify }}
- {{ printf "--%s-insecure-skip-verify=true" $prefix | quote }}
{{- end }}
{{- end -}}
{{- end -}}

{{- define "podgpu.source.args" -}}
{{- $source := .Values.source -}}
{{- if include "podgpu.source.discovers" . }}
- {{ printf "--discover-kubernetes=%s" (include "podgpu.source.selector" .) | quote }}
{{- include "podgpu.source.access" (list "exporter" "/etc/podgpu/exporters" $source.exporterAccess) }}
{{- else }}
- {{ printf "--prometheus=%s" $source.prometheus.url | quote }}
{{- with $source.prometheus.match }}
- {{ printf "--match=%s" . | quote }}
{{- end }}
{{- with $source.prometheus.tenant }}
- {{ printf "--prometheus-tenant=%s" . | quote }}
{{- end }}
{{- include "podgpu.source.access" (list "prometheus" "/etc/podgpu/prometheus" $source.prometheus) }}
{{- end }}
{{- end -}}

{{/* A YAML list with {name, path, secret} of each Secret with credentials. */}}
{{- define "podgpu.source.secrets" -}}
{{- with .Values.source.prometheus.secret.name }}
- {name: prometheus-access, path: /etc/podgpu/prometheus, secret: {{ . }}}
{{- end }}
{{- with .Values.source.exporterAccess.secret.name }}
- {name: exporter-access, path: /etc/podgpu/exporters, secret: {{ . }}}
{{- end }}
{{- end -}}

{{/* Checks that the schema cannot express. */}}
{{- define "podgpu.source.check" -}}
{{- $source := .Values.source -}}
{{- range $name, $access := dict "prometheus" $source.prometheus "exporterAccess" $source.exporterAccess -}}
{{- $keys := compact (list $access.secret.tokenKey $access.secret.passwordKey $access.secret.caKey) -}}
{{- if ne (empty $keys) (empty $access.secret.name) -}}
{{- fail (printf "source.%s.secret: set both a name and keys (tokenKey, passwordKey, caKey), or none" $name) -}}
{{- end -}}
{{- if ne (empty $access.username) (empty $access.secret.passwordKey) -}}
{{- fail (printf "source.%s: set both username and secret.passwordKey, or none" $name) -}}
{{- end -}}
{{- end -}}
{{- if and (include "podgpu.source.discovers" .) (not .Values.exporter.enabled) (not $source.discover.selector) -}}
{{- fail "there is no source of figures: exporter.enabled is false, and neither source.prometheus.url nor source.discover.selector is set" -}}
{{- end -}}
{{- end -}}
