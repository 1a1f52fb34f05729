{{/* Values of dcgm-exporter's chart at the top level. Three are accepted; the others fail with the name of podgpu's value. */}}

{{- define "podgpu.exporter.arguments" -}}
{{- include "podgpu.words" (concat (.Values.arguments | default list) .Values.exporter.arguments) -}}
{{- end -}}

{{- define "podgpu.exporter.extraEnv" -}}
{{- toYaml (concat (.Values.extraEnv | default list) .Values.exporter.extraEnv) -}}
{{- end -}}

{{- define "podgpu.exporter.extraConfigMapVolumes" -}}
{{- toYaml (concat (.Values.extraConfigMapVolumes | default list) .Values.exporter.extraConfigMapVolumes) -}}
{{- end -}}

{{/* Name in dcgm-exporter's chart -> name in this chart. The schema allows these names, so that this message is shown. */}}
{{- define "podgpu.dcgmChart" -}}
affinity: gpuNodes.affinity
basicAuth: exporter.webConfig, a Secret with a web config file
customMetrics: exporter.counters.csv
extraHostVolumes: exporter.extraHostVolumes
extraVolumeMounts: exporter.extraVolumeMounts
hostNetwork: exporter.hostNetwork
hostPID: exporter.usage.from
kubeletPath: kubeletRoot, without pod-resources at its end
kubernetes: exporter.kubernetes.podLabels and exporter.kubernetes.podUid
kubernetesDRA: exporter.kubernetes.dra
namespaceOverride: helm's --namespace
nodeSelector: gpuNodes.nodeSelector
podSecurityContext: exporter.runAsUser and seLinuxOptions; the rest follows from what is switched on
resources: exporter.resources
rollingUpdate: updateStrategy.rollingUpdate
runtimeClassName: gpus.runtimeClassName
securityContext: exporter.addCapabilities; the rest follows from what is switched on
service: exporter.service and exporter.port
serviceAccount: a name that the chart chooses; remove it
serviceMonitor: monitor, with enabled, interval, additionalLabels and relabelings in it
tlsServerConfig: exporter.webConfig, a Secret with a web config file
tolerations: gpuNodes.tolerations
{{- end -}}

{{- define "podgpu.dcgmChart.check" -}}
{{- $values := .Values -}}
{{- range $theirs, $ours := include "podgpu.dcgmChart" . | fromYaml -}}
{{- if hasKey $values $theirs -}}
{{- fail (printf "%s is a value of dcgm-exporter's chart. Here it is %s" $theirs $ours) -}}
{{- end -}}
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
{{- range $one := include "podgpu.exporter.standsFor" . | fromYamlArray -}}
{{- $flag := printf "^--?(%s)(=.*)?$" (join "|" $one.flags) -}}
{{- range $arguments -}}
{{- if regexMatch $flag . -}}
{{- fail (printf "exporter.arguments: %s: use the value %s, which also sets what this flag needs" . $one.value) -}}
{{- end -}}
{{- end -}}
{{- range $env -}}
{{- if eq .name ($one.env | default "") -}}
{{- fail (printf "exporter.extraEnv: %s is set by the chart: use the value %s, which also sets what this variable needs" .name $one.value) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
