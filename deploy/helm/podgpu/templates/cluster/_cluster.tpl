{{/* What `podgpu cluster` is started with. */}}

{{/* Whether it finds the exporters through the API server. */}}
{{- define "podgpu.cluster.discovers" -}}
{{- if not .Values.cluster.prometheus.url -}} true {{- end -}}
{{- end -}}

{{- define "podgpu.cluster.token" -}}
{{- if or (include "podgpu.cluster.discovers" .) .Values.cluster.podOwners -}} true {{- end -}}
{{- end -}}

{{/* An EndpointSlice has the labels of its Service. */}}
{{- define "podgpu.cluster.selector" -}}
{{- $discover := .Values.cluster.discover -}}
{{- $ours := printf "app.kubernetes.io/name=%s,app.kubernetes.io/instance=%s,app.kubernetes.io/component=exporter" (include "podgpu.name" .) .Release.Name -}}
{{- $selector := default $ours $discover.selector -}}
{{- if $discover.allNamespaces -}}{{ printf "/%s" $selector }}
{{- else -}}{{ printf "%s/%s" (default .Release.Namespace $discover.namespace) $selector }}{{- end -}}
{{- end -}}

{{/* (list prefix directory access): flags of one kind of server. */}}
{{- define "podgpu.cluster.access" -}}
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

{{- define "podgpu.cluster.args" -}}
{{- $cluster := .Values.cluster -}}
- {{ printf "--address=:%v" $cluster.port | quote }}
{{- if include "podgpu.cluster.discovers" . }}
- {{ printf "--discover-kubernetes=%s" (include "podgpu.cluster.selector" .) | quote }}
{{- include "podgpu.cluster.access" (list "exporter" "/etc/podgpu/exporters" $cluster.exporterAccess) }}
{{- else }}
- {{ printf "--prometheus=%s" $cluster.prometheus.url | quote }}
{{- with $cluster.prometheus.match }}
- {{ printf "--match=%s" . | quote }}
{{- end }}
{{- with $cluster.prometheus.tenant }}
- {{ printf "--prometheus-tenant=%s" . | quote }}
{{- end }}
{{- include "podgpu.cluster.access" (list "prometheus" "/etc/podgpu/prometheus" $cluster.prometheus) }}
{{- end }}
- --owners={{ ternary "api" "none" $cluster.podOwners }}
{{- with $cluster.interval }}
- {{ printf "--interval=%s" . | quote }}
{{- end }}
{{- if $cluster.historyDir }}
- --history-dir=/var/lib/podgpu/history
{{- end }}
{{- if eq (toString $cluster.prices) "example" }}
- --prices=example
{{- else if $cluster.prices }}
- --prices=/etc/podgpu/prices/prices.yaml
{{- end }}
{{- if $cluster.webConfig.secretName }}
- {{ printf "--web-config-file=/etc/podgpu/web/%s" $cluster.webConfig.key | quote }}
- {{ printf "--probe-address=:%v" $cluster.webConfig.probePort | quote }}
{{- end }}
{{- with $cluster.arguments }}
{{ include "podgpu.words" . }}
{{- end }}
{{- end -}}

{{- define "podgpu.cluster.mounts" -}}
{{- $cluster := .Values.cluster -}}
{{- if $cluster.historyDir }}
- {name: history, mountPath: /var/lib/podgpu/history}
{{- end }}
{{- if and $cluster.prices (kindIs "map" $cluster.prices) }}
- {name: prices, mountPath: /etc/podgpu/prices, readOnly: true}
{{- end }}
{{- if $cluster.prometheus.secret.name }}
- {name: prometheus-access, mountPath: /etc/podgpu/prometheus, readOnly: true}
{{- end }}
{{- if $cluster.exporterAccess.secret.name }}
- {name: exporter-access, mountPath: /etc/podgpu/exporters, readOnly: true}
{{- end }}
{{- if $cluster.webConfig.secretName }}
- {name: web-config, mountPath: /etc/podgpu/web, readOnly: true}
{{- end }}
{{- with $cluster.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "podgpu.cluster.volumes" -}}
{{- $cluster := .Values.cluster -}}
{{- with $cluster.historyDir }}
{{- if eq . "emptyDir" }}
- {name: history, emptyDir: {sizeLimit: 512Mi}}
{{- else }}
- {name: history, persistentVolumeClaim: {claimName: {{ trimPrefix "claim:" . }}}}
{{- end }}
{{- end }}
{{- if and $cluster.prices (kindIs "map" $cluster.prices) }}
- {name: prices, configMap: {name: {{ include "podgpu.component" (list . "prices") }}}}
{{- end }}
{{- with $cluster.prometheus.secret.name }}
- {name: prometheus-access, secret: {secretName: {{ . }}}}
{{- end }}
{{- with $cluster.exporterAccess.secret.name }}
- {name: exporter-access, secret: {secretName: {{ . }}}}
{{- end }}
{{- with $cluster.webConfig.secretName }}
- {name: web-config, secret: {secretName: {{ . }}}}
{{- end }}
{{- with $cluster.extraConfigMapVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* What the schema cannot say. */}}
{{- define "podgpu.cluster.check" -}}
{{- $cluster := .Values.cluster -}}
{{- if and $cluster.historyDir $cluster.prometheus.url -}}
{{- fail "cluster.historyDir: has no effect with cluster.prometheus.url, because Prometheus has the history; remove one of them" -}}
{{- end -}}
{{- if and (hasPrefix "claim:" $cluster.historyDir) (gt (int $cluster.replicas) 1) -}}
{{- fail "cluster.historyDir: only one replica can use a claim; set cluster.replicas to 1, or use emptyDir" -}}
{{- end -}}
{{- range $name, $access := dict "prometheus" $cluster.prometheus "exporterAccess" $cluster.exporterAccess -}}
{{- $keys := compact (list $access.secret.tokenKey $access.secret.passwordKey $access.secret.caKey) -}}
{{- if and $keys (not $access.secret.name) -}}
{{- fail (printf "cluster.%s.secret has keys and no name; set the name of the Secret" $name) -}}
{{- end -}}
{{- if and $access.secret.name (not $keys) -}}
{{- fail (printf "cluster.%s.secret has a name and no key; set tokenKey, passwordKey or caKey" $name) -}}
{{- end -}}
{{- if ne (empty $access.username) (empty $access.secret.passwordKey) -}}
{{- fail (printf "cluster.%s: set both username and secret.passwordKey, or none" $name) -}}
{{- end -}}
{{- end -}}
{{- range include "podgpu.words" $cluster.arguments | fromYamlArray -}}
{{- if regexMatch "^--?(a|address|web-config-file|probe-address)(=.*)?$" . -}}
{{- fail (printf "cluster.arguments: %s: use cluster.port or cluster.webConfig, which also set the Service and the probes" .) -}}
{{- end -}}
{{- end -}}
{{- if and (include "podgpu.cluster.discovers" .) (not .Values.exporter.enabled) (not $cluster.discover.selector) -}}
{{- fail "cluster: there is no source of figures: exporter.enabled is false, and neither cluster.prometheus.url nor cluster.discover.selector is set" -}}
{{- end -}}
{{- if and $cluster.webConfig.secretName (eq (int $cluster.webConfig.probePort) (int $cluster.port)) -}}
{{- fail "cluster.webConfig.probePort and cluster.port are the same; probes need a port of their own" -}}
{{- end -}}
{{- end -}}
