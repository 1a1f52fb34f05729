{{/* Parts of pods that components share: security contexts, probes, scrapes, network policies. */}}

{{/* A container's security context: (dict "capabilities" list "privileged" bool).
Kubernetes rejects SYS_ADMIN together with allowPrivilegeEscalation: false. */}}
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

{{/* A pod's security context. The argument is the uid: 0 to read files of root, otherwise 65534. */}}
{{- define "podgpu.podSecurity" -}}
{{- $uid := . | toString -}}
runAsUser: {{ $uid }}
runAsGroup: {{ $uid }}
runAsNonRoot: {{ ne $uid "0" }}
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{/* Port of the probes for components with a web config, because the kubelet has no credentials. */}}
{{- define "podgpu.probePort" -}} 9402 {{- end -}}

{{/* Returns https if the web config enables TLS, otherwise an empty string. */}}
{{- define "podgpu.scheme" -}}
{{- if dig "webConfig" "secretName" "" . -}}{{- if .webConfig.tls -}} https {{- end -}}{{- end -}}
{{- end -}}

{{- define "podgpu.ports" -}}
- {name: metrics, containerPort: {{ .port }}, protocol: TCP}
{{- if .webConfig.secretName }}
- {name: probes, containerPort: {{ include "podgpu.probePort" . }}, protocol: TCP}
{{- end }}
{{- end -}}

{{/* Probes: (list root name-of-their-port). */}}
{{- define "podgpu.probes" -}}
{{- $values := (index . 0).Values -}}
{{- $port := index . 1 -}}
livenessProbe:
  httpGet: {path: /livez, port: {{ $port }}}
  {{- toYaml $values.livenessProbe | nindent 2 }}
readinessProbe:
  httpGet: {path: /ready, port: {{ $port }}}
  {{- toYaml $values.readinessProbe | nindent 2 }}
{{- end -}}

{{/* The priority class of a pod: (list root component). GKE allows system-node-critical only in kube-system. */}}
{{- define "podgpu.priorityClassName" -}}
{{- $root := index . 0 -}}
{{- $component := index . 1 -}}
{{- $name := (index $root.Values $component).priorityClassName | default $root.Values.priorityClassName -}}
{{- if ne $name "auto" -}}
{{- $name -}}
{{- else if and (has $component (list "exporter" "enrich" "hook")) (not (contains "-gke." $root.Capabilities.KubeVersion.Version)) -}}
system-node-critical
{{- end -}}
{{- end -}}

{{/* How the pods of a DaemonSet are replaced: (list root component). The new exporter starts beside the old one, so that its
node always has metrics, and `helm --wait` waits for every pod. Two pods of a node cannot share a port of the node, a history
on the host, the textfile directory or the container runtime: there, the old pod ends first. */}}
{{- define "podgpu.updateStrategy" -}}
{{- $values := (index . 0).Values -}}
{{- $exporter := $values.exporter -}}
{{- $isAlone := or (ne (index . 1) "exporter") $exporter.hostNetwork (hasPrefix "/" $exporter.historyDir) -}}
{{- if $values.updateStrategy -}}
{{- toYaml $values.updateStrategy -}}
{{- else if $isAlone -}}
type: RollingUpdate
rollingUpdate: {maxUnavailable: 10%}
{{- else -}}
type: RollingUpdate
rollingUpdate: {maxUnavailable: 0, maxSurge: 10%}
{{- end -}}
{{- end -}}

{{/* The part of the pod spec that all components share: (list root component). */}}
{{- define "podgpu.podSettings" -}}
{{- $values := (index . 0).Values -}}
serviceAccountName: {{ include "podgpu.component" . }}
{{- with $values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with include "podgpu.priorityClassName" . }}
priorityClassName: {{ . }}
{{- end }}
enableServiceLinks: false
{{- end -}}

{{/* Scheduling of a Deployment's pods: (list root component). */}}
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

{{/* Converts arguments to text. --set turns 1000 into a number, and Helm would write 3600000 as 3.6e+06. */}}
{{- define "podgpu.words" -}}
{{- $words := list -}}
{{- range . -}}
{{- $whole := and (kindIs "float64" .) (eq (floor .) .) -}}
{{- $words = append $words (ternary (int64 .) . $whole | toString) -}}
{{- end -}}
{{- toYaml $words -}}
{{- end -}}

{{/* The variables of the chart and of the user: (list path-of-the-value chart-variables user-variables). Fails if both set the same variable. */}}
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

{{/* Relabelings for metrics with pod labels.

The labels pod, namespace and container of a series name the *workload*. The operator adds labels of the same names for
the *exporter's* pod. With honorLabels, the labels of the series take precedence. Series without these labels, such as
those of unallocated GPUs, would still get the exporter's. So the labels of the exporter are renamed to exporter_*.
These rules come after the operator's own, which set the labels. */}}
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
  {{- else }}{{/* series about all nodes: the labels of podgpu's pod are dropped, because they would change when the pod moves */}}
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

{{/* A ServiceMonitor or PodMonitor: (list root component). Components without a Service always have a PodMonitor. */}}
{{- define "podgpu.monitor" -}}
{{- $root := index . 0 -}}
{{- $component := index . 1 -}}
{{- $monitor := $root.Values.monitor -}}
{{- $kind := ternary "PodMonitor" $monitor.kind (has $component (list "enrich" "hook")) -}}
{{- $place := list $root $component -}}
{{- $values := index $root.Values $component -}}
{{- $isProtected := dig "webConfig" "secretName" "" $values -}}
{{- if include "podgpu.on" (list $root (include "podgpu.monitor.enabled" $root)) }}
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

{{/* Egress to the API server. A policy cannot select its address. Most network plugins check packets after the Service's
address is translated, so these are the API server's own ports in managed clusters, kubeadm and k3s, minikube, microk8s. */}}
{{- define "podgpu.apiServerEgress" -}}
- ports:
    {{- range list 443 6443 8443 16443 }}
    - {port: {{ . }}, protocol: TCP}
    {{- end }}
{{- end -}}

{{/* Egress to DNS. OpenShift's DNS pods listen on 5353. */}}
{{- define "podgpu.dnsEgress" -}}
- ports:
    {{- range list 53 5353 }}
    - {port: {{ . }}, protocol: UDP}
    - {port: {{ . }}, protocol: TCP}
    {{- end }}
{{- end -}}

{{/* Egress to the host of a URL: (list root url). Policies check the port of the pods, which can differ from the port of
their Service. So for a Service in the cluster all ports of its namespace are allowed, otherwise only the URL's port. */}}
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
