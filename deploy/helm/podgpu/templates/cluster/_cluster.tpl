{{/* Arguments of `podgpu cluster`. */}}

{{- define "podgpu.cluster.token" -}}
{{- $checksUsers := eq .Values.cluster.auth "kubernetes" -}}
{{- if or (include "podgpu.source.discovers" .) .Values.cluster.podOwners $checksUsers -}} true {{- end -}}
{{- end -}}

{{/* Not empty if cluster.prices depend on the labels of nodes, at any date. */}}
{{- define "podgpu.cluster.nodePrices" -}}
{{- if kindIs "map" .Values.cluster.prices -}}
{{- range prepend (default list .Values.cluster.prices.changes) .Values.cluster.prices -}}
{{- with .nodes -}} true {{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "podgpu.cluster.args" -}}
{{- $cluster := .Values.cluster -}}
- {{ printf "--address=:%v" $cluster.port | quote }}
{{- include "podgpu.source.args" . }}
- --owners={{ ternary "api" "none" $cluster.podOwners }}
{{- if $cluster.historyDir }}
- --history-dir=/var/lib/podgpu/history
{{- end }}
{{- if eq (toString $cluster.prices) "example" }}
- --prices=example
{{- else if $cluster.prices }}
- --prices=/etc/podgpu/prices/prices.yaml
{{- end }}
{{- if $cluster.webConfig.secretName }}
- --web-config-file=/etc/podgpu/web/web-config.yml
- {{ printf "--probe-address=:%s" (include "podgpu.probePort" .) | quote }}
{{- end }}
{{- if ne $cluster.auth "none" }}
- --auth={{ $cluster.auth }}
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
{{- range include "podgpu.source.secrets" . | fromYamlArray }}
- {name: {{ .name }}, mountPath: {{ .path }}, readOnly: true}
{{- end }}
{{- if $cluster.webConfig.secretName }}
- {name: web-config, mountPath: /etc/podgpu/web, readOnly: true}
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
{{- range include "podgpu.source.secrets" . | fromYamlArray }}
- {name: {{ .name }}, secret: {secretName: {{ .secret }}}}
{{- end }}
{{- with $cluster.webConfig.secretName }}
- {name: web-config, secret: {secretName: {{ . }}}}
{{- end }}
{{- end -}}

{{/* Checks that the schema cannot express. */}}
{{- define "podgpu.cluster.check" -}}
{{- $cluster := .Values.cluster -}}
{{- include "podgpu.source.check" . -}}
{{- if and $cluster.historyDir .Values.source.prometheus.url -}}
{{- fail "cluster.historyDir: has no effect with source.prometheus.url, because Prometheus has the history; remove one of them" -}}
{{- end -}}
{{- if and (hasPrefix "claim:" $cluster.historyDir) (gt (int $cluster.replicas) 1) -}}
{{- fail "cluster.historyDir: only one replica can use a claim; set cluster.replicas to 1, or use emptyDir" -}}
{{- end -}}
{{- range include "podgpu.words" $cluster.arguments | fromYamlArray -}}
{{- if regexMatch "^--?(a|address|web-config-file|probe-address|auth)(=.*)?$" . -}}
{{- fail (printf "cluster.arguments: %s: use cluster.port, cluster.webConfig or cluster.auth, which also set the Service, the probes and the permissions" .) -}}
{{- end -}}
{{- end -}}
{{- if and $cluster.webConfig.secretName (eq (include "podgpu.probePort" .) (toString $cluster.port)) -}}
{{- fail "cluster.port is the port of the probes; choose another one" -}}
{{- end -}}
{{- end -}}
