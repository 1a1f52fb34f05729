{{/* Arguments, mounts and permissions of the exporter. */}}

{{/* NAMESPACE:NAME of the ConfigMap with counters, from the value or from dcgm-exporter's variable. */}}
{{- define "podgpu.exporter.configMapData" -}}
{{- if .Values.exporter.counters.configMap -}}
{{- .Values.exporter.counters.configMap -}}
{{- else -}}
{{- range include "podgpu.exporter.extraEnv" . | fromYamlArray -}}
{{- if and (eq .name "DCGM_EXPORTER_CONFIGMAP_DATA") (ne (.value | default "none") "none") -}}
{{- if not (regexMatch "^[^:/]+:[^:/]+$" .value) -}}
{{- fail (printf "exporter.extraEnv: DCGM_EXPORTER_CONFIGMAP_DATA %q: write NAMESPACE:NAME" .value) -}}
{{- end -}}
{{- .value -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Regular expressions of the pod labels to read as a YAML list; `all` for all labels. Empty: none. `auto`: the labels that
usually name a team, with cluster.profile=full. */}}
{{- define "podgpu.exporter.podLabels" -}}
{{- $kubernetes := .Values.exporter.kubernetes -}}
{{- $labels := $kubernetes.podLabels -}}
{{- if eq (toString $labels.enabled) "true" -}}
{{- default (list "all") $labels.allowlistRegex | toYaml -}}
{{- else if and (eq (toString $labels.enabled) "auto") $kubernetes.enabled (eq .Values.cluster.profile "full") -}}
{{- $usual := list "^(team|owner|project|department|cost-?center)$" "^app[.]kubernetes[.]io/part-of$" -}}
{{- default $usual $labels.allowlistRegex | toYaml -}}
{{- end -}}
{{- end -}}

{{/* The needed API server access as YAML: {pods, slices, configMap}. If all are off, there is no token and no role. */}}
{{- define "podgpu.exporter.api" -}}
{{- $kubernetes := .Values.exporter.kubernetes -}}
pods: {{ or $kubernetes.annotations $kubernetes.dra (include "podgpu.exporter.podLabels" . | empty | not) }}
slices: {{ $kubernetes.dra }}
configMap: {{ include "podgpu.exporter.configMapData" . | quote }}
{{- end -}}

{{- define "podgpu.exporter.token" -}}
{{- $api := include "podgpu.exporter.api" . | fromYaml -}}
{{- if or $api.pods $api.slices $api.configMap (include "podgpu.exporter.apiWriters" . | fromYamlArray) -}} true {{- end -}}
{{- end -}}

{{/* The entries of exporter.write without their arguments, as a YAML list. */}}
{{- define "podgpu.exporter.writers" -}}
{{- $writers := list -}}
{{- range .Values.exporter.write }}{{ $writers = append $writers (splitList ":" . | first) }}{{ end -}}
{{- toYaml $writers -}}
{{- end -}}

{{/* Those that write to the API server. */}}
{{- define "podgpu.exporter.apiWriters" -}}
{{- toYaml (without (include "podgpu.exporter.writers" . | fromYamlArray) "nvsentinel") -}}
{{- end -}}

{{/* The rules of a writer's ClusterRole, by its name. The same as in `podgpu.writers.write_option.PERMISSIONS`. */}}
{{- define "podgpu.exporter.writerRules" -}}
{{- if eq . "events" -}}
# `get` finds an Event that was written before a restart.
- {apiGroups: [""], resources: [events], verbs: [create, get, patch]}
{{- else if eq . "condition" -}}
# RBAC cannot restrict this to the condition, or to the exporter's own node (docs/security.md).
- {apiGroups: [""], resources: [nodes], verbs: [get]}
- {apiGroups: [""], resources: [nodes/status], verbs: [patch]}
{{- else if eq . "taints" -}}
- {apiGroups: [resource.k8s.io], resources: [devicetaintrules], verbs: [list, create, patch, delete]}
- {apiGroups: [resource.k8s.io], resources: [resourceslices], verbs: [list]}
# The Node owns the rules, so Kubernetes deletes them together.
- {apiGroups: [""], resources: [nodes], verbs: [get]}
{{- end -}}
{{- end -}}

{{/* The value of --allocation. Empty if the exporter's `auto` is correct. With a token, `auto` would also read annotations,
which the role may not allow, and it does not know where podlist.json is mounted. */}}
{{- define "podgpu.exporter.allocation" -}}
{{- $kubernetes := .Values.exporter.kubernetes -}}
{{- $annotations := or $kubernetes.annotations $kubernetes.dra -}}
{{- $tokenForElse := and (include "podgpu.exporter.token" .) (not $annotations) -}}
{{- if $kubernetes.allocation -}}
{{- $kubernetes.allocation -}}
{{- else if and $kubernetes.enabled (or $tokenForElse $kubernetes.podlistDirectory) -}}
{{- $sources := list -}}
{{- if $annotations }}{{ $sources = append $sources "annotations" }}{{ end -}}
{{- if $kubernetes.podlistDirectory }}{{ $sources = append $sources "podlist:/etc/podgpu/podlist/podlist.json" }}
{{- else if .Values.hook.enabled }}{{ $sources = append $sources "podlist" }}{{ end -}}
{{- $sources = append $sources "kubelet" -}}
{{- if .Values.exporter.hpcJobMappingDir }}{{ $sources = append $sources "hpc" }}{{ end -}}
{{- if ne .Values.exporter.usage.from "none" }}{{ $sources = append $sources "processes" }}{{ end -}}
{{- join "," $sources -}}
{{- end -}}
{{- end -}}

{{- define "podgpu.exporter.uid" -}}
{{- $uid := .Values.exporter.runAsUser | toString -}}
{{- if ne $uid "auto" -}}{{ $uid }}
{{- else if .Values.exporter.kubernetes.enabled -}} 0 {{- else -}} 65534 {{- end -}}
{{- end -}}

{{- define "podgpu.exporter.capabilities" -}}
{{- $add := .Values.exporter.addCapabilities -}}
{{- if or .Values.gpus.migMonitoring (eq .Values.exporter.usage.from "exact") }}{{ $add = append $add "SYS_ADMIN" }}{{ end -}}
{{- if .Values.exporter.xidBlame }}{{ $add = append $add "SYSLOG" }}{{ end -}}
{{- toYaml (uniq $add) -}}
{{- end -}}

{{/* True if the exporter needs the file names in /var/log, for usage or for pod UIDs, which Events contain. */}}
{{- define "podgpu.exporter.readsLogNames" -}}
{{- $writesEvents := has "events" (include "podgpu.exporter.writers" . | fromYamlArray) -}}
{{- if or (ne .Values.exporter.usage.from "none") .Values.exporter.kubernetes.podUid $writesEvents -}} true {{- end -}}
{{- end -}}

{{- define "podgpu.exporter.env" -}}
{{- $exporter := .Values.exporter -}}
{{- $kubernetes := $exporter.kubernetes -}}
- {name: NODE_NAME, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}
- {name: DCGM_EXPORTER_KUBERNETES, value: {{ $kubernetes.enabled | quote }}}
- {name: DCGM_EXPORTER_LISTEN, value: {{ printf ":%v" $exporter.port | quote }}}
- {name: PODGPU_USAGE_FROM, value: {{ $exporter.usage.from }}}
{{- with $exporter.dcgmNames }}
- {name: PODGPU_DCGM_NAMES, value: {{ . | toString | quote }}}
{{- end }}
{{- if $exporter.counters.configMap }}
- {name: DCGM_EXPORTER_CONFIGMAP_DATA, value: {{ include "podgpu.exporter.configMapData" . | quote }}}
{{- end }}
{{- with include "podgpu.exporter.podLabels" . | fromYamlArray }}
- {name: DCGM_EXPORTER_KUBERNETES_ENABLE_POD_LABELS, value: "true"}
{{- if ne (first .) "all" }}
- {name: DCGM_EXPORTER_KUBERNETES_POD_LABEL_ALLOWLIST_REGEX, value: {{ join "," . | quote }}}
{{- end }}
{{- end }}
{{- if $kubernetes.podUid }}
- {name: DCGM_EXPORTER_KUBERNETES_ENABLE_POD_UID, value: "true"}
{{- end }}
{{- if $kubernetes.dra }}
- {name: KUBERNETES_ENABLE_DRA, value: "true"}
{{- end }}
{{- if $kubernetes.virtualGpus }}
- {name: KUBERNETES_VIRTUAL_GPUS, value: "true"}
{{- end }}
{{- if not $kubernetes.dcgmHolderLabels }}
- {name: PODGPU_DCGM_HOLDER_LABELS, value: "false"}
{{- end }}
{{- with include "podgpu.exporter.allocation" . }}
- {name: PODGPU_ALLOCATION, value: {{ . | quote }}}
{{- end }}
{{- with $exporter.write }}
- {name: PODGPU_WRITE, value: {{ join "," . | quote }}}
{{- end }}
{{- with $exporter.hpcJobMappingDir }}
- {name: DCGM_HPC_JOB_MAPPING_DIR, value: {{ . | quote }}}
{{- end }}
{{- if $exporter.historyDir }}
- {name: PODGPU_HISTORY_DIR, value: /var/lib/podgpu/history}
{{- end }}
{{- if $exporter.webConfig.secretName }}
- {name: DCGM_EXPORTER_WEB_CONFIG_FILE, value: /etc/podgpu/web/web-config.yml}
- {name: PODGPU_PROBE_ADDRESS, value: {{ printf ":%s" (include "podgpu.probePort" .) | quote }}}
{{- end }}
{{- include "podgpu.gpuEnv" . }}
{{- end -}}

{{- define "podgpu.exporter.args" -}}
{{- $counters := .Values.exporter.counters -}}
{{- $args := list -}}
{{- if $counters.csv }}{{ $args = list "-f" "/etc/podgpu/counters/counters.csv" }}
{{- else if $counters.set }}{{ $args = list "-f" $counters.set }}{{ end -}}
{{- toYaml (concat $args (include "podgpu.exporter.arguments" . | fromYamlArray)) -}}
{{- end -}}

{{- define "podgpu.exporter.mounts" -}}
{{- $exporter := .Values.exporter -}}
{{- if $exporter.kubernetes.enabled }}
- {name: pod-resources, mountPath: /var/lib/kubelet/pod-resources, readOnly: true}
{{- end }}
{{- if and $exporter.kubernetes.enabled $exporter.kubernetes.dra }}
- {name: dra-driver, mountPath: /var/lib/kubelet/plugins/gpu.nvidia.com, readOnly: true}
{{- end }}
{{- if $exporter.kubernetes.podlistDirectory }}
- {name: podlist, mountPath: /etc/podgpu/podlist, readOnly: true}
{{- end }}
{{- if include "podgpu.exporter.readsLogNames" . }}
- {name: pod-logs, mountPath: /var/log/pods, readOnly: true}
- {name: container-logs, mountPath: /var/log/containers, readOnly: true}
{{- end }}
{{- with $exporter.hpcJobMappingDir }}
- {name: hpc-jobs, mountPath: {{ . }}, readOnly: true}
{{- end }}
{{- if $exporter.historyDir }}
- {name: history, mountPath: /var/lib/podgpu/history}
{{- end }}
{{- if has "nvsentinel" (include "podgpu.exporter.writers" . | fromYamlArray) }}
- {name: nvsentinel, mountPath: /var/run/nvsentinel, readOnly: true}
{{- end }}
{{- if $exporter.counters.csv }}
- {name: counters, mountPath: /etc/podgpu/counters, readOnly: true}
{{- end }}
{{- if $exporter.webConfig.secretName }}
- {name: web-config, mountPath: /etc/podgpu/web, readOnly: true}
{{- end }}
{{- include "podgpu.gpuMounts" . }}
{{- with $exporter.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "podgpu.exporter.volumes" -}}
{{- $exporter := .Values.exporter -}}
{{- if $exporter.kubernetes.enabled }}
# Mounts the directory, because a restarted kubelet creates a new socket.
- {name: pod-resources, hostPath: {path: {{ .Values.kubeletRoot }}/pod-resources, type: Directory}}
{{- end }}
{{- if and $exporter.kubernetes.enabled $exporter.kubernetes.dra }}
# The DRA driver's checkpoint, with the MIG device of each claim. Created if the driver does not run here.
- {name: dra-driver, hostPath: {path: {{ .Values.kubeletRoot }}/plugins/gpu.nvidia.com, type: DirectoryOrCreate}}
{{- end }}
{{- with $exporter.kubernetes.podlistDirectory }}
- {name: podlist, hostPath: {path: {{ . }}, type: Directory}}
{{- end }}
{{- if include "podgpu.exporter.readsLogNames" . }}
- {name: pod-logs, hostPath: {path: /var/log/pods, type: Directory}}
- {name: container-logs, hostPath: {path: /var/log/containers, type: Directory}}
{{- end }}
{{- with $exporter.hpcJobMappingDir }}
- {name: hpc-jobs, hostPath: {path: {{ . }}, type: Directory}}
{{- end }}
{{- with $exporter.historyDir }}
{{- if eq . "emptyDir" }}
- {name: history, emptyDir: {sizeLimit: 64Mi}}
{{- else }}
- {name: history, hostPath: {path: {{ . }}, type: DirectoryOrCreate}}
{{- end }}
{{- end }}
{{- if has "nvsentinel" (include "podgpu.exporter.writers" . | fromYamlArray) }}
# The directory of the socket. Created if NVSentinel does not run here yet.
- {name: nvsentinel, hostPath: {path: /var/run/nvsentinel, type: DirectoryOrCreate}}
{{- end }}
{{- if $exporter.counters.csv }}
- {name: counters, configMap: {name: {{ include "podgpu.component" (list . "counters") }}}}
{{- end }}
{{- with $exporter.webConfig.secretName }}
- {name: web-config, secret: {secretName: {{ . }}}}
{{- end }}
{{- include "podgpu.gpuVolumes" . }}
{{- with concat (include "podgpu.exporter.extraConfigMapVolumes" . | fromYamlArray) $exporter.extraHostVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Checks that the schema cannot express. */}}
{{- define "podgpu.exporter.check" -}}
{{- $exporter := .Values.exporter -}}
{{- $kubernetes := $exporter.kubernetes -}}
{{- include "podgpu.exporter.standsFor.check" . -}}
{{- if and $exporter.counters.csv $exporter.counters.set -}}
{{- fail "exporter.counters: csv and set both name the counters; keep one of them" -}}
{{- end -}}
{{- $writers := include "podgpu.exporter.writers" . | fromYamlArray -}}
{{- if ne (len $writers) (len (uniq $writers)) -}}
{{- fail "exporter.write: the same entry is listed with and without its argument; keep one of them" -}}
{{- end -}}
{{- if not $kubernetes.enabled -}}
{{- if $exporter.write -}}
{{- fail "exporter.write is set, but exporter.kubernetes.enabled is false: it writes about the pods that hold the GPUs" -}}
{{- end -}}
{{- range $name := list "annotations" "podUid" "dra" "virtualGpus" -}}
{{- if index $kubernetes $name -}}
{{- fail (printf "exporter.kubernetes.%s is on, but exporter.kubernetes.enabled is false: it has no effect without pods" $name) -}}
{{- end -}}
{{- end -}}
{{- if eq (toString $kubernetes.podLabels.enabled) "true" -}}
{{- fail "exporter.kubernetes.podLabels.enabled is on, but exporter.kubernetes.enabled is false: it has no effect without pods" -}}
{{- end -}}
{{- end -}}
{{- if and .Values.gpus.migMonitoring (has .Values.gpus.access (list "cdi" "driver-root")) -}}
{{- fail (printf "gpus.migMonitoring is for gpus.access runtime or volume-mounts; with %s it has no effect" .Values.gpus.access) -}}
{{- end -}}
{{- $uid := include "podgpu.exporter.uid" . -}}
{{- if and $exporter.xidBlame (ne $uid "0") -}}
{{- fail (printf "exporter.xidBlame is true, but it would run as uid %s: Kubernetes gives an added capability to uid 0 only. Set exporter.runAsUser to 0" $uid) -}}
{{- end -}}
{{- if and $exporter.xidBlame (eq $exporter.usage.from "none") -}}
{{- fail "exporter.xidBlame needs the containers of processes: set exporter.usage.from to auto" -}}
{{- end -}}
{{- if and (eq $exporter.usage.from "exact") (ne $uid "0") -}}
{{- fail (printf "exporter.usage.from is exact, but it would run as uid %s: Kubernetes gives an added capability to uid 0 only. Set exporter.runAsUser to 0" $uid) -}}
{{- end -}}
{{- if and $exporter.webConfig.secretName (eq (include "podgpu.probePort" .) (toString $exporter.port)) -}}
{{- fail "exporter.port is the port of the probes; choose another one" -}}
{{- end -}}
{{- end -}}

{{/* Annotations of the objects that clean up. The argument is the order: the job comes after its permissions. */}}
{{- define "podgpu.exporter.withdrawHook" -}}
helm.sh/hook: post-delete
helm.sh/hook-weight: {{ . | quote }}
helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
{{- end -}}
