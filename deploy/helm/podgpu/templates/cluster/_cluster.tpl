{{/* Arguments of `podgpu cluster`. */}}

{{/* The effective values as YAML: {enabled, owners, queue, prices, history, creates, lost}. `history` is empty (in memory), emptyDir
or the name of a claim. `creates`: the chart creates the claim. `lost`: there is no StorageClass for it. */}}
{{- define "podgpu.cluster.settings" -}}
{{- $cluster := .Values.cluster -}}
{{- $full := eq $cluster.profile "full" -}}
{{- $stores := not .Values.source.prometheus.url -}}
{{- $history := $cluster.historyDir -}}
{{- if and (not $history) $full $stores }}{{ $history = "claim" }}{{ end -}}
{{- $claim := trimPrefix "claim:" $history -}}
{{- $creates := eq $history "claim" -}}
{{- $lost := and $creates (include "podgpu.cluster.lacksStorageClass" .) -}}
{{- if $lost }}{{ $claim = "emptyDir" }}{{ $creates = false }}{{ end -}}
{{- if $creates }}{{ $claim = include "podgpu.component" (list . "history") }}{{ end -}}
{{- if eq $history "memory" }}{{ $claim = "" }}{{ end -}}
enabled: {{ or $cluster.enabled $full }}
owners: {{ ternary $full $cluster.podOwners (eq (toString $cluster.podOwners) "auto") }}
queue: {{ ternary $full $cluster.queue (eq (toString $cluster.queue) "auto") }}
prices: {{ kindIs "map" $cluster.prices | ternary "file" (default (ternary "example" "none" $full) $cluster.prices) }}
history: {{ $claim | quote }}
creates: {{ $creates }}
lost: {{ not (empty $lost) }}
{{- end -}}

{{/* Not empty if a claim would stay pending. Without access to a cluster (`helm template`), this is not known. */}}
{{- define "podgpu.cluster.lacksStorageClass" -}}
{{- $name := include "podgpu.component" (list . "history") -}}
{{- $isConnected := lookup "v1" "Namespace" "" "kube-system" -}}
{{- if and $isConnected (not .Values.cluster.historyClaim.storageClassName) -}}
{{- $exists := lookup "v1" "PersistentVolumeClaim" .Release.Namespace $name -}}
{{- $default := "" -}}
{{- range (lookup "storage.k8s.io/v1" "StorageClass" "" "").items -}}
{{- if eq (dig "metadata" "annotations" "storageclass.kubernetes.io/is-default-class" "" .) "true" }}{{ $default = .metadata.name }}{{ end -}}
{{- end -}}
{{- if not (or $exists $default) -}} true {{- end -}}
{{- end -}}
{{- end -}}

{{- define "podgpu.cluster.on" -}}
{{- if (include "podgpu.cluster.settings" . | fromYaml).enabled -}} true {{- end -}}
{{- end -}}

{{- define "podgpu.cluster.token" -}}
{{- $checksUsers := eq .Values.cluster.auth "kubernetes" -}}
{{- $settings := include "podgpu.cluster.settings" . | fromYaml -}}
{{- $reads := or (eq .Values.cluster.tokenMetrics "pods") $settings.owners $settings.queue -}}
{{- if or (include "podgpu.source.discovers" .) $checksUsers $reads -}} true {{- end -}}
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
{{- $settings := include "podgpu.cluster.settings" . | fromYaml -}}
- {{ printf "--address=:%v" $cluster.port | quote }}
{{- include "podgpu.source.args" . }}
- --owners={{ ternary "api" "none" $settings.owners }}
{{- if $settings.queue }}
- --queue
{{- end }}
{{- if ne $cluster.tokenMetrics "auto" }}
- --token-metrics={{ $cluster.tokenMetrics }}
{{- end }}
{{- if $settings.history }}
- --history-dir=/var/lib/podgpu/history
{{- end }}
{{- if eq $settings.history "emptyDir" }}
- "--history-note=it is lost when the pod is replaced{{ if $settings.lost }}, because the cluster has no default StorageClass{{ end }}: set cluster.historyClaim.storageClassName, or cluster.historyDir=claim:NAME"
{{- end }}
{{- if eq $settings.prices "example" }}
- --prices=example
{{- else if eq $settings.prices "file" }}
- --prices=/etc/podgpu/prices/prices.yaml
{{- end }}
{{- if $cluster.budgets }}
- --budgets=/etc/podgpu/budgets/budgets.yaml
{{- end }}
{{- if $cluster.webhook.secretName }}
- --webhook-url-file=/etc/podgpu/webhook/url
{{- if $cluster.webhook.token }}
- --webhook-token-file=/etc/podgpu/webhook/token
{{- end }}
- --webhook-events={{ join "," $cluster.webhook.events }}
- --webhook-idle-after={{ $cluster.webhook.idleAfter }}
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
{{- $settings := include "podgpu.cluster.settings" . | fromYaml -}}
{{- if $settings.history }}
- {name: history, mountPath: /var/lib/podgpu/history}
{{- end }}
{{- if eq $settings.prices "file" }}
- {name: prices, mountPath: /etc/podgpu/prices, readOnly: true}
{{- end }}
{{- if $cluster.budgets }}
- {name: budgets, mountPath: /etc/podgpu/budgets, readOnly: true}
{{- end }}
{{- range include "podgpu.source.secrets" . | fromYamlArray }}
- {name: {{ .name }}, mountPath: {{ .path }}, readOnly: true}
{{- end }}
{{- if $cluster.webhook.secretName }}
- {name: webhook, mountPath: /etc/podgpu/webhook, readOnly: true}
{{- end }}
{{- if $cluster.webConfig.secretName }}
- {name: web-config, mountPath: /etc/podgpu/web, readOnly: true}
{{- end }}
{{- end -}}

{{- define "podgpu.cluster.volumes" -}}
{{- $cluster := .Values.cluster -}}
{{- $settings := include "podgpu.cluster.settings" . | fromYaml -}}
{{- with $settings.history }}
{{- if eq . "emptyDir" }}
- {name: history, emptyDir: {sizeLimit: {{ $cluster.historyClaim.size }}}}
{{- else }}
- {name: history, persistentVolumeClaim: {claimName: {{ . }}}}
{{- end }}
{{- end }}
{{- if eq $settings.prices "file" }}
- {name: prices, configMap: {name: {{ include "podgpu.component" (list . "prices") }}}}
{{- end }}
{{- if $cluster.budgets }}
- {name: budgets, configMap: {name: {{ include "podgpu.component" (list . "budgets") }}}}
{{- end }}
{{- range include "podgpu.source.secrets" . | fromYamlArray }}
- {name: {{ .name }}, secret: {secretName: {{ .secret }}}}
{{- end }}
{{- with $cluster.webhook.secretName }}
- {name: webhook, secret: {secretName: {{ . }}}}
{{- end }}
{{- with $cluster.webConfig.secretName }}
- {name: web-config, secret: {secretName: {{ . }}}}
{{- end }}
{{- end -}}

{{/* Checks that the schema cannot express. */}}
{{- define "podgpu.cluster.check" -}}
{{- $cluster := .Values.cluster -}}
{{- include "podgpu.source.check" . -}}
{{- $keeps := and $cluster.historyDir (ne $cluster.historyDir "memory") -}}
{{- if and $keeps .Values.source.prometheus.url -}}
{{- fail "cluster.historyDir: has no effect with source.prometheus.url, because Prometheus has the history; remove one of them" -}}
{{- end -}}
{{- $history := (include "podgpu.cluster.settings" . | fromYaml).history -}}
{{- if and $history (ne $history "emptyDir") (gt (int $cluster.replicas) 1) -}}
{{- fail "cluster.historyDir: only one replica can use a claim; set cluster.replicas to 1, set source.prometheus.url, or use emptyDir" -}}
{{- end -}}
{{- if and $cluster.webhook.secretName (gt (int $cluster.replicas) 1) -}}
{{- fail "cluster.webhook: each replica would report everything: set cluster.replicas to 1" -}}
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
