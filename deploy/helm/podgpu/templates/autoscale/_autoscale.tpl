{{/* What `podgpu autoscale` is started with. */}}

{{- define "podgpu.autoscale.discovers" -}}
{{- if not .Values.autoscale.prometheus.url -}} true {{- end -}}
{{- end -}}

{{/* The names of the APIServices that lead here, in a YAML list. */}}
{{- define "podgpu.autoscale.apiServices" -}}
{{- if .Values.autoscale.customMetrics.enabled }}
- v1beta2.custom.metrics.k8s.io
- v1beta1.custom.metrics.k8s.io
{{- end }}
{{- end -}}

{{/* The Secret with the metrics API's certificate; empty: podgpu makes its own. */}}
{{- define "podgpu.autoscale.apiSecret" -}}
{{- $tls := .Values.autoscale.customMetrics.certificate -}}
{{- if eq $tls.from "secret" -}}{{ $tls.secretName }}
{{- else if eq $tls.from "cert-manager" -}}{{ include "podgpu.component" (list . "autoscale") }}-tls
{{- end -}}
{{- end -}}

{{- define "podgpu.autoscale.args" -}}
{{- $autoscale := .Values.autoscale -}}
- {{ printf "--probe-address=:%v" $autoscale.probePort | quote }}
{{- if $autoscale.keda.secretName }}
- {{ printf "--keda-address=:%v" $autoscale.keda.port | quote }}
- --keda-cert-file=/etc/podgpu/keda/tls.crt
- --keda-key-file=/etc/podgpu/keda/tls.key
- --keda-client-ca-file=/etc/podgpu/keda/ca.crt
{{- with $autoscale.keda.clientNames }}
- {{ printf "--keda-client-name=%s" (join "," .) | quote }}
{{- end }}
{{- else }}
- --keda-address=none
{{- end }}
{{- if $autoscale.customMetrics.enabled }}
- {{ printf "--api-address=:%v" $autoscale.customMetrics.port | quote }}
{{- if include "podgpu.autoscale.apiSecret" . }}
- --api-cert-file=/etc/podgpu/api/tls.crt
- --api-key-file=/etc/podgpu/api/tls.key
{{- else }}
- {{ printf "--api-service=%s/%s" .Release.Namespace (include "podgpu.component" (list . "autoscale")) | quote }}
{{- end }}
{{- end }}
{{- if include "podgpu.autoscale.discovers" . }}
- {{ printf "--discover-kubernetes=%s" (include "podgpu.autoscale.selector" .) | quote }}
{{- include "podgpu.cluster.access" (list "exporter" "/etc/podgpu/exporters" $autoscale.exporterAccess) }}
{{- else }}
- {{ printf "--prometheus=%s" $autoscale.prometheus.url | quote }}
{{- with $autoscale.prometheus.match }}
- {{ printf "--match=%s" . | quote }}
{{- end }}
{{- with $autoscale.prometheus.tenant }}
- {{ printf "--prometheus-tenant=%s" . | quote }}
{{- end }}
{{- include "podgpu.cluster.access" (list "prometheus" "/etc/podgpu/prometheus" $autoscale.prometheus) }}
{{- end }}
{{- with $autoscale.interval }}
- {{ printf "--interval=%s" . | quote }}
{{- end }}
{{- with $autoscale.longestWindow }}
- {{ printf "--longest-window=%s" . | quote }}
{{- end }}
{{- with $autoscale.arguments }}
{{ include "podgpu.words" . }}
{{- end }}
{{- end -}}

{{- define "podgpu.autoscale.selector" -}}
{{- $discover := .Values.autoscale.discover -}}
{{- $ours := printf "app.kubernetes.io/name=%s,app.kubernetes.io/instance=%s,app.kubernetes.io/component=exporter" (include "podgpu.name" .) .Release.Name -}}
{{- $selector := default $ours $discover.selector -}}
{{- if $discover.allNamespaces -}}{{ printf "/%s" $selector }}
{{- else -}}{{ printf "%s/%s" (default .Release.Namespace $discover.namespace) $selector }}{{- end -}}
{{- end -}}

{{/* (list name path secret) of each Secret that is mounted, as YAML. */}}
{{- define "podgpu.autoscale.secrets" -}}
{{- $autoscale := .Values.autoscale -}}
{{- with $autoscale.keda.secretName }}
- {name: keda, path: /etc/podgpu/keda, secret: {{ . }}}
{{- end }}
{{- with and $autoscale.customMetrics.enabled (include "podgpu.autoscale.apiSecret" .) }}
- {name: api, path: /etc/podgpu/api, secret: {{ . }}}
{{- end }}
{{- with $autoscale.prometheus.secret.name }}
- {name: prometheus-access, path: /etc/podgpu/prometheus, secret: {{ . }}}
{{- end }}
{{- with $autoscale.exporterAccess.secret.name }}
- {name: exporter-access, path: /etc/podgpu/exporters, secret: {{ . }}}
{{- end }}
{{- end -}}

{{/* What the schema cannot say, and whether an APIService is somebody else's. */}}
{{- define "podgpu.autoscale.check" -}}
{{- $root := . -}}
{{- $autoscale := .Values.autoscale -}}
{{- $service := include "podgpu.component" (list . "autoscale") -}}
{{- if not (or $autoscale.keda.secretName $autoscale.customMetrics.enabled) -}}
{{- fail "autoscale: it would serve no API: customMetrics.enabled is false and keda.secretName is empty" -}}
{{- end -}}
{{- $tls := $autoscale.customMetrics.certificate -}}
{{- if and (eq $tls.from "secret") (not (and $tls.secretName $tls.caBundle)) -}}
{{- fail "autoscale.customMetrics.certificate: from secret needs secretName and caBundle (the CA's PEM in base64)" -}}
{{- end -}}
{{- if and (eq $tls.from "cert-manager") (not $tls.issuerRef.name) -}}
{{- fail "autoscale.customMetrics.certificate: from cert-manager needs issuerRef.name" -}}
{{- end -}}
{{- range $name, $access := dict "prometheus" $autoscale.prometheus "exporterAccess" $autoscale.exporterAccess -}}
{{- $keys := compact (list $access.secret.tokenKey $access.secret.passwordKey $access.secret.caKey) -}}
{{- if ne (empty $keys) (empty $access.secret.name) -}}
{{- fail (printf "autoscale.%s.secret: set both a name and keys (tokenKey, passwordKey, caKey), or none" $name) -}}
{{- end -}}
{{- end -}}
{{- if and (include "podgpu.autoscale.discovers" .) (not .Values.exporter.enabled) (not $autoscale.discover.selector) -}}
{{- fail "autoscale: there is no source of figures: exporter.enabled is false, and neither autoscale.prometheus.url nor autoscale.discover.selector is set" -}}
{{- end -}}
{{- range include "podgpu.words" $autoscale.arguments | fromYamlArray -}}
{{- if regexMatch "^--?(probe-address|keda-address|keda-[a-z]+-file|api-address|api-service|api-[a-z]+-file|unregister)(=.*)?$" . -}}
{{- fail (printf "autoscale.arguments: %s: use its value, which also sets ports, Secrets and permissions" .) -}}
{{- end -}}
{{- end -}}
{{- range include "podgpu.autoscale.apiServices" . | fromYamlArray -}}
{{- $found := lookup "apiregistration.k8s.io/v1" "APIService" "" . -}}
{{- if $found -}}
{{- $owner := dig "spec" "service" dict $found -}}
{{- if or (ne (dig "namespace" "" $owner) $root.Release.Namespace) (ne (dig "name" "" $owner) $service) -}}
{{- fail (printf "the APIService %s belongs to %s/%s: only one can have it. Remove that first, or set autoscale.customMetrics.enabled=false and use KEDA" . (dig "namespace" "-" $owner) (dig "name" "-" $owner)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
