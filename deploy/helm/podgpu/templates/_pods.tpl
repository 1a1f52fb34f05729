{{/* What pods have in common: rights, probes, scrapes. */}}

{{/* (dict "capabilities" list "privileged" bool): all a container may not do.
Kubernetes holds that SYS_ADMIN and "no escalation" contradict each other. */}}
{{- define "podgpu.containerSecurity" -}}
{{- if .privileged }}
privileged: true
readOnlyRootFilesystem: true
{{- else }}
allowPrivilegeEscalation: {{ has "SYS_ADMIN" .capabilities }}
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
  {{- with .capabilities }}
  add:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* The uid: of a pod that reads what is root's, and of one that does not. */}}
{{- define "podgpu.podSecurity" -}}
{{- $uid := . | toString -}}
runAsUser: {{ $uid }}
runAsGroup: {{ $uid }}
runAsNonRoot: {{ ne $uid "0" }}
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{/* (list component's values): the port that answers the kubelet. */}}
{{- define "podgpu.probePort" -}}
{{- if .webConfig.secretName -}} probes {{- else -}} metrics {{- end -}}
{{- end -}}

{{/* https where a web config is said to have TLS; else empty. */}}
{{- define "podgpu.scheme" -}}
{{- if dig "webConfig" "secretName" "" . -}}{{- if .webConfig.tls -}} https {{- end -}}{{- end -}}
{{- end -}}

{{- define "podgpu.ports" -}}
- {name: metrics, containerPort: {{ .port }}, protocol: TCP}
{{- if .webConfig.secretName }}
- {name: probes, containerPort: {{ .webConfig.probePort }}, protocol: TCP}
{{- end }}
{{- end -}}

{{- define "podgpu.probes" -}}
livenessProbe:
  httpGet: {path: /livez, port: {{ include "podgpu.probePort" . }}}
  {{- toYaml .livenessProbe | nindent 2 }}
readinessProbe:
  httpGet: {path: /ready, port: {{ include "podgpu.probePort" . }}}
  {{- toYaml .readinessProbe | nindent 2 }}
{{- end -}}

{{/* Arguments as text: --set makes a number of 1000, and a file's 3600000 would be written 3.6e+06. */}}
{{- define "podgpu.words" -}}
{{- $words := list -}}
{{- range . -}}
{{- $whole := and (kindIs "float64" .) (eq (floor .) .) -}}
{{- $words = append $words (ternary (int64 .) . $whole | toString) -}}
{{- end -}}
{{- toYaml $words -}}
{{- end -}}

{{/* (list path-of-the-value taken given): the chart's variables and the user's, which may not be the same ones. */}}
{{- define "podgpu.env" -}}
{{- $path := index . 0 -}}
{{- $ours := index . 1 -}}
{{- $names := list -}}
{{- range $ours }}{{ $names = append $names .name }}{{ end -}}
{{- range index . 2 -}}
{{- if has .name $names -}}
{{- fail (printf "%s: %s is set by the chart; use its value instead of extraEnv" $path .name) -}}
{{- end -}}
{{- end -}}
{{- toYaml (concat $ours (index . 2)) -}}
{{- end -}}

{{/* How metrics whose series name workloads are scraped.

Series carry pod, namespace and container of the *workload*. The operator puts labels of the same names on the target,
with the *exporter's* pod in them. honorLabels lets the series' own win; a series without them, such as that of a GPU
nobody holds, would still get the target's, and an idle GPU would seem to belong to the exporter. So the target's are moved
to exporter_*. These rules come after the operator's own, which set the labels. */}}
{{- define "podgpu.endpoint" -}}
port: {{ .port }}
path: /metrics
{{- with .monitor.scheme | default .scheme }}
scheme: {{ . }}
{{- end }}
interval: {{ .monitor.interval }}
scrapeTimeout: {{ .monitor.scrapeTimeout }}
{{- range $key := list "tlsConfig" "basicAuth" "authorization" }}
{{- with index $.monitor $key }}
{{ $key }}:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
honorLabels: true
relabelings:
  - {sourceLabels: [__meta_kubernetes_pod_name], targetLabel: exporter_pod}
  - {sourceLabels: [__meta_kubernetes_namespace], targetLabel: exporter_namespace}
  - {sourceLabels: [__meta_kubernetes_pod_container_name], targetLabel: exporter_container}
  {{- if ne .component "cluster" }}
  - {sourceLabels: [__meta_kubernetes_pod_node_name], targetLabel: node}
  {{- else }}{{/* its series are of every node: a pod that moves must not fork those that name none */}}
  {{- end }}
  - {action: labeldrop, regex: pod|namespace|container}
  {{- with .monitor.relabelings }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with .monitor.metricRelabelings }}
metricRelabelings:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* (list root component port): a ServiceMonitor or a PodMonitor. */}}
{{- define "podgpu.monitor" -}}
{{- $root := index . 0 -}}
{{- $monitor := (index $root.Values (index . 1)).monitor -}}
{{- $kind := $monitor.kind | default "PodMonitor" -}}
{{- $place := list $root (index . 1) -}}
{{- $scheme := include "podgpu.scheme" (index $root.Values (index . 1)) -}}
apiVersion: monitoring.coreos.com/v1
kind: {{ $kind }}
metadata:
  {{- include "podgpu.metadata" $place | nindent 2 }}
    {{- with $monitor.additionalLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  selector:
    matchLabels:
      {{- include "podgpu.selectorLabels" $place | nindent 6 }}
  namespaceSelector:
    matchNames: [{{ $root.Release.Namespace }}]
  {{ ternary "endpoints" "podMetricsEndpoints" (eq $kind "ServiceMonitor") }}:
    - {{ include "podgpu.endpoint" (dict "monitor" $monitor "port" (index . 2) "scheme" $scheme "component" (index . 1)) | indent 6 | trim }}
{{- end -}}

{{/* Egress to the API server, whose address a policy cannot name. Most network plugins judge a packet after the Service has
been translated, so these are the ports it listens on itself: managed clusters, kubeadm and k3s, minikube, microk8s. */}}
{{- define "podgpu.apiServerEgress" -}}
- ports:
    {{- range list 443 6443 8443 16443 }}
    - {port: {{ . }}, protocol: TCP}
    {{- end }}
{{- end -}}

{{/* 5353: where OpenShift's own listen behind their Service. */}}
{{- define "podgpu.dnsEgress" -}}
- ports:
    {{- range list 53 5353 }}
    - {port: {{ . }}, protocol: UDP}
    - {port: {{ . }}, protocol: TCP}
    {{- end }}
{{- end -}}

{{/* (list root url): egress to whom the URL names. The port of a Service need not be that of its pods, and the latter is
judged: to a Service of the cluster every port of its namespace is open, elsewhere the URL's alone. */}}
{{- define "podgpu.urlEgress" -}}
{{- $url := urlParse (index . 1) -}}
{{- $port := regexFind ":[0-9]+$" $url.host | trimPrefix ":" | default (ternary "443" "80" (eq $url.scheme "https")) -}}
{{- $host := regexReplaceAll ":[0-9]+$" $url.host "" -}}
- ports: [{port: {{ $port }}, protocol: TCP}]
{{- if regexMatch "^[a-z][-a-z0-9]*(\\.[-a-z0-9]+(\\.svc(\\.[-a-z0-9.]+)?)?)?$" $host }}
{{- $parts := splitList "." $host }}
- ports: [{protocol: TCP}]
  to:
    - namespaceSelector:
        matchLabels:
          kubernetes.io/metadata.name: {{ if gt (len $parts) 1 }}{{ index $parts 1 }}{{ else }}{{ (index . 0).Release.Namespace }}{{ end }}
{{- end }}
{{- end -}}
