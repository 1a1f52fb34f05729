{{/* Values of dcgm-exporter's chart at the top level. Some are accepted; the others fail with the name of podgpu's value. */}}

{{- define "podgpu.exporter.arguments" -}}
{{- include "podgpu.words" (concat (.Values.arguments | default list) .Values.exporter.arguments) -}}
{{- end -}}

{{- define "podgpu.exporter.extraEnv" -}}
{{- toYaml (concat (.Values.extraEnv | default list) .Values.exporter.extraEnv) -}}
{{- end -}}

{{- define "podgpu.exporter.extraConfigMapVolumes" -}}
{{- toYaml (concat (.Values.extraConfigMapVolumes | default list) .Values.exporter.extraConfigMapVolumes) -}}
{{- end -}}

{{- define "podgpu.exporter.resources" -}}
{{- toYaml (.Values.resources | default .Values.exporter.resources) -}}
{{- end -}}

{{- define "podgpu.runtimeClassName" -}}
{{- .Values.runtimeClassName | default .Values.gpus.runtimeClassName -}}
{{- end -}}

{{/* The value monitor.enabled, or serviceMonitor.enabled of dcgm-exporter's chart. */}}
{{- define "podgpu.monitor.enabled" -}}
{{- dig "enabled" .Values.monitor.enabled (.Values.serviceMonitor | default dict) -}}
{{- end -}}

{{/* Name in dcgm-exporter's chart -> name in this chart. The schema allows these names, so that this message is shown. */}}
{{- define "podgpu.dcgmChart" -}}
affinity: gpuNodes.affinity
basicAuth: exporter.webConfig, a Secret with a web config file
config: "exporter.arguments, as [--config-file, PATH], with exporter.extraConfigMapVolumes and exporter.extraVolumeMounts"
customMetrics: exporter.counters.csv
daemonSetAnnotations: "remove it: podAnnotations sets the annotations of the pods"
debugDump: "remove it: read /api/v1/node instead"
extraHostVolumes: exporter.extraHostVolumes
extraVolumeMounts: exporter.extraVolumeMounts
hostNetwork: exporter.hostNetwork
hostPID: exporter.usage.from
initContainers: "remove it: the exporter needs none"
kubeletPath: kubeletRoot, without pod-resources at its end
kubernetes: exporter.kubernetes.podLabels and exporter.kubernetes.podUid
kubernetesDRA: exporter.kubernetes.dra
mapPodsMetrics: exporter.kubernetes.enabled
namespaceOverride: helm's --namespace
nodeSelector: gpuNodes.nodeSelector
podSecurityContext: exporter.runAsUser and seLinuxOptions; the rest follows from what is switched on
rollingUpdate: updateStrategy.rollingUpdate
securityContext: exporter.addCapabilities; the rest follows from what is switched on
service: "exporter.service and exporter.port; for the timeouts, DCGM_EXPORTER_WEB_READ_TIMEOUT and DCGM_EXPORTER_WEB_WRITE_TIMEOUT in exporter.extraEnv"
serviceAccount: "remove it: the chart chooses the name"
serviceMonitor.additionalLabels: monitor.additionalLabels
serviceMonitor.apiVersion: "remove it: the chart knows it"
serviceMonitor.honorLabels: "remove it: it is always true"
serviceMonitor.interval: monitor.interval
serviceMonitor.metricRelabelings: monitor.metricRelabelings
serviceMonitor.relabelings: monitor.relabelings
serviceMonitor.scrapeTimeout: monitor.scrapeTimeout
tlsServerConfig: exporter.webConfig, a Secret with a web config file
tolerations: gpuNodes.tolerations
{{- end -}}

{{- define "podgpu.dcgmChart.check" -}}
{{- $values := .Values -}}
{{- $lines := list -}}
{{- range $theirs, $ours := include "podgpu.dcgmChart" . | fromYaml -}}
{{- $parts := splitList "." $theirs -}}
{{- $holder := $values -}}
{{- if gt (len $parts) 1 -}}{{- $holder = get $values (first $parts) | default dict -}}{{- end -}}
{{- if hasKey $holder (last $parts) -}}
{{- $lines = append $lines (printf "  %s -> %s" $theirs $ours) -}}
{{- end -}}
{{- end -}}
{{- if $lines -}}
{{- fail (printf "values of dcgm-exporter's chart, and what to use here:\n%s" (join "\n" $lines)) -}}
{{- end -}}
{{- end -}}

{{/* Flag or variable -> the value to use instead, which also adds the port, mount or permission that it needs. */}}
{{- define "podgpu.exporter.standsFor" -}}
- {flags: [a, address], env: DCGM_EXPORTER_LISTEN, value: exporter.port}
- {flags: [k, kubernetes], env: DCGM_EXPORTER_KUBERNETES, value: exporter.kubernetes.enabled}
- {flags: [m, configmap-data], value: exporter.counters.configMap}
- {flags: [kubernetes-enable-pod-labels], env: DCGM_EXPORTER_KUBERNETES_ENABLE_POD_LABELS, value: exporter.kubernetes.podLabels.enabled}
- {flags: [kubernetes-enable-pod-uid], env: DCGM_EXPORTER_KUBERNETES_ENABLE_POD_UID, value: exporter.kubernetes.podUid}
- {flags: [kubernetes-enable-dra], env: KUBERNETES_ENABLE_DRA, value: exporter.kubernetes.dra}
- {flags: [usage-from], env: PODGPU_USAGE_FROM, value: exporter.usage.from}
- {flags: [hpc-job-mapping-dir], env: DCGM_HPC_JOB_MAPPING_DIR, value: exporter.hpcJobMappingDir}
- {flags: [history-dir], env: PODGPU_HISTORY_DIR, value: exporter.historyDir}
- {flags: [pod-resources-kubelet-socket], env: DCGM_POD_RESOURCES_KUBELET_SOCKET, value: kubeletRoot}
- {flags: [web-config-file], env: DCGM_EXPORTER_WEB_CONFIG_FILE, value: exporter.webConfig.secretName}
- {flags: [probe-address], env: PODGPU_PROBE_ADDRESS, value: exporter.webConfig}
{{- end -}}

{{- define "podgpu.exporter.standsFor.check" -}}
{{- $arguments := include "podgpu.exporter.arguments" . | fromYamlArray -}}
{{- $env := include "podgpu.exporter.extraEnv" . | fromYamlArray -}}
{{- $lines := list -}}
{{- range $one := include "podgpu.exporter.standsFor" . | fromYamlArray -}}
{{- $flag := printf "^--?(%s)(=.*)?$" (join "|" $one.flags) -}}
{{- range $arguments -}}
{{- if regexMatch $flag . -}}
{{- $lines = append $lines (printf "  exporter.arguments: %s -> %s" . $one.value) -}}
{{- end -}}
{{- end -}}
{{- range $env -}}
{{- if eq .name ($one.env | default "") -}}
{{- $lines = append $lines (printf "  exporter.extraEnv: %s -> %s" .name $one.value) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if $lines -}}
{{- fail (printf "flags and variables that the chart sets. Use these values, which also set what they need:\n%s" (join "\n" $lines)) -}}
{{- end -}}
{{- end -}}
