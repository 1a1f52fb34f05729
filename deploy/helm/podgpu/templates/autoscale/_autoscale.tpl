{{/* Arguments and Secrets of `podgpu autoscale`. */}}

{{/* A YAML list of the names of podgpu's APIServices. */}}
{{- define "podgpu.autoscale.apiServices" -}}
{{- if .Values.autoscale.customMetrics.enabled }}
- v1beta2.custom.metrics.k8s.io
- v1beta1.custom.metrics.k8s.io
{{- end }}
{{- end -}}

{{/* The Secret with the certificate of the metrics API. Empty if podgpu creates the certificate. */}}
{{- define "podgpu.autoscale.apiSecret" -}}
{{- $tls := .Values.autoscale.customMetrics.certificate -}}
{{- if eq $tls.from "secret" -}}{{ $tls.secretName }}
{{- else if eq $tls.from "cert-manager" -}}{{ include "podgpu.component" (list . "autoscale") }}-tls
{{- end -}}
{{- end -}}

{{- define "podgpu.autoscale.args" -}}
{{- $autoscale := .Values.autoscale -}}
- --probe-address=:9410
{{- if $autoscale.keda.secretName }}
- --keda-address=:9411
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
- --api-address=:6443
{{- if include "podgpu.autoscale.apiSecret" . }}
- --api-cert-file=/etc/podgpu/api/tls.crt
- --api-key-file=/etc/podgpu/api/tls.key
{{- else }}
- {{ printf "--api-service=%s/%s" .Release.Namespace (include "podgpu.component" (list . "autoscale")) | quote }}
{{- end }}
{{- end }}
{{- include "podgpu.source.args" . }}
{{- with $autoscale.arguments }}
{{ include "podgpu.words" . }}
{{- end }}
{{- end -}}

{{/* A YAML list with (list name path secret) of each mounted Secret. */}}
{{- define "podgpu.autoscale.secrets" -}}
{{- $autoscale := .Values.autoscale -}}
{{- with $autoscale.keda.secretName }}
- {name: keda, path: /etc/podgpu/keda, secret: {{ . }}}
{{- end }}
{{- with and $autoscale.customMetrics.enabled (include "podgpu.autoscale.apiSecret" .) }}
- {name: api, path: /etc/podgpu/api, secret: {{ . }}}
{{- end }}
{{- include "podgpu.source.secrets" . }}
{{- end -}}

{{/* Checks that the schema cannot express. Fails if another Service owns one of the APIServices. */}}
{{- define "podgpu.autoscale.check" -}}
{{- $root := . -}}
{{- $autoscale := .Values.autoscale -}}
{{- $service := include "podgpu.component" (list . "autoscale") -}}
{{- if not (or $autoscale.keda.secretName $autoscale.customMetrics.enabled) -}}
{{- fail "autoscale: it would serve no API: customMetrics.enabled is false and keda.secretName is empty" -}}
{{- end -}}
{{- $secret := $autoscale.keda.secretName -}}
{{- $namespace := lookup "v1" "Namespace" "" $root.Release.Namespace -}}
{{- if and $secret $namespace (not (lookup "v1" "Secret" $root.Release.Namespace $secret)) -}}
{{- fail (printf "autoscale.keda.secretName: there is no Secret %s in the namespace %s. The pods could not start, and without them no namespace of the cluster can be deleted. Create it first: see docs/autoscaling.md" $secret $root.Release.Namespace) -}}
{{- end -}}
{{- $tls := $autoscale.customMetrics.certificate -}}
{{- if and (eq $tls.from "secret") (not (and $tls.secretName $tls.caBundle)) -}}
{{- fail "autoscale.customMetrics.certificate: from secret needs secretName and caBundle (the CA's PEM in base64)" -}}
{{- end -}}
{{- if and (eq $tls.from "cert-manager") (not $tls.issuerRef.name) -}}
{{- fail "autoscale.customMetrics.certificate: from cert-manager needs issuerRef.name" -}}
{{- end -}}
{{- include "podgpu.source.check" . -}}
{{- range include "podgpu.words" $autoscale.arguments | fromYamlArray -}}
{{- if regexMatch "^--?(probe-address|keda-address|keda-[a-z]+-file|api-address|api-service|api-[a-z]+-file)(=.*)?$" . -}}
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
