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

{{/* Of the exporter and of the cluster view, where they have a web config: the kubelet has no credentials. */}}
{{- define "podgpu.probePort" -}} 9402 {{- end -}}

{{/* https where a web config is said to have TLS; else empty. */}}
{{- define "podgpu.scheme" -}}
{{- if dig "webConfig" "secretName" "" . -}}{{- if .webConfig.tls -}} https {{- end -}}{{- end -}}
{{- end -}}

{{- define "podgpu.ports" -}}
- {name: metrics, containerPort: {{ .port }}, protocol: TCP}
{{- if .webConfig.secretName }}
- {name: probes, containerPort: {{ include "podgpu.probePort" . }}, protocol: TCP}
{{- end }}
{{- end -}}

{{/* The name of the port that answers the kubelet. */}}
{{- define "podgpu.probes" -}}
livenessProbe:
  httpGet: {path: /livez, port: {{ . }}}
  initialDelaySeconds: 10
  periodSeconds: 15
  timeoutSeconds: 5
  failureThreshold: 4
readinessProbe:
  httpGet: {path: /ready, port: {{ . }}}
  initialDelaySeconds: 2
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 3
{{- end -}}

{{/* (list root component): lines of a pod's spec that all components have. */}}
{{- define "podgpu.podSettings" -}}
{{- $values := (index . 0).Values -}}
serviceAccountName: {{ include "podgpu.component" . }}
{{- with $values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with (index $values (index . 1)).priorityClassName | default $values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
enableServiceLinks: false
{{- end -}}

{{/* (list root component): where the pods of a Deployment go. */}}
{{- define "podgpu.placement" -}}
{{- $component := index (index . 0).Values (index . 1) -}}
nodeSelector:
  {{- toYaml (merge (deepCopy $component.nodeSelector) (dict "kubernetes.io/os" "linux")) | nindent 2 }}
{{- with $component.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $component.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "podgpu.podAnnotations" -}}
kubectl.kubernetes.io/default-container: podgpu
{{- with .Values.podAnnotations }}
{{ toYaml . }}
{{- end }}
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
port: metrics
path: /metrics
{{- with .scheme }}
scheme: {{ . }}
{{- end }}
interval: {{ .monitor.interval }}
scrapeTimeout: {{ .monitor.scrapeTimeout }}
{{- if .isProtected }}
{{- range $key := list "tlsConfig" "basicAuth" "authorization" }}
{{- with index $.monitor $key }}
{{ $key }}:
  {{- toYaml . | nindent 2 }}
{{- end }}
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

{{/* (list root component): a ServiceMonitor, or a PodMonitor, which components without a Service always have. */}}
{{- define "podgpu.monitor" -}}
{{- $root := index . 0 -}}
{{- $component := index . 1 -}}
{{- $monitor := $root.Values.monitor -}}
{{- $kind := ternary "PodMonitor" $monitor.kind (has $component (list "enrich" "hook")) -}}
{{- $place := list $root $component -}}
{{- $values := index $root.Values $component -}}
{{- $isProtected := dig "webConfig" "secretName" "" $values -}}
{{- if include "podgpu.on" (list $root $monitor.enabled) }}
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
    - {{ include "podgpu.endpoint" (dict "monitor" $monitor "scheme" (include "podgpu.scheme" $values) "isProtected" $isProtected "component" $component) | indent 6 | trim }}
{{- end }}
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
