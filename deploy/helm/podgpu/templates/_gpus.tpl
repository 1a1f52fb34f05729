{{/* Selects the GPU nodes and gives containers access to the GPUs. */}}

{{/* Common labels of GPU nodes. A node needs one of them. */}}
{{- define "podgpu.knownGpuNodes" -}}
nodeAffinity:
  requiredDuringSchedulingIgnoredDuringExecution:
    nodeSelectorTerms:
      - matchExpressions: [{key: nvidia.com/gpu.present, operator: In, values: ["true"]}]
      - matchExpressions: [{key: feature.node.kubernetes.io/pci-10de.present, operator: In, values: ["true"]}]
      - matchExpressions: [{key: hardware-type, operator: In, values: [NVIDIAGPU]}]
      - matchExpressions: [{key: cloud.google.com/gke-accelerator, operator: Exists}]
      - matchExpressions: [{key: k8s.amazonaws.com/accelerator, operator: Exists}]
      - matchExpressions: [{key: karpenter.k8s.aws/instance-gpu-manufacturer, operator: In, values: [nvidia]}]
      - matchExpressions: [{key: kubernetes.azure.com/accelerator, operator: In, values: [nvidia]}]
{{- end -}}

{{/* Nodes on which the GPU operator would run its exporter: the second label is that of nodes with DRA (GPUCluster). */}}
{{- define "podgpu.operatorNodes" -}}
nodeAffinity:
  requiredDuringSchedulingIgnoredDuringExecution:
    nodeSelectorTerms:
      - matchExpressions: [{key: nvidia.com/gpu.deploy.dcgm-exporter, operator: In, values: ["true"]}]
      - matchExpressions: [{key: nvidia.com/gpu.deploy.dcgm-exporter-dra, operator: In, values: ["true"]}]
{{- end -}}

{{/* The affinity of a DaemonSet's pods. Empty if they may run on all nodes. */}}
{{- define "podgpu.gpuNodes.affinity" -}}
{{- $nodes := .Values.gpuNodes -}}
{{- if eq $nodes.labels "operator" -}}
{{- if dig "nodeAffinity" "requiredDuringSchedulingIgnoredDuringExecution" "" $nodes.affinity -}}
{{- fail "gpuNodes.affinity: its node selector terms would replace those of gpuNodes.labels=operator. Add the label of the operator to each of your terms, and set gpuNodes.labels=all" -}}
{{- end -}}
{{- toYaml (merge (deepCopy $nodes.affinity) (include "podgpu.operatorNodes" . | fromYaml)) -}}
{{- else if $nodes.affinity -}}
{{- toYaml $nodes.affinity -}}
{{- else if eq $nodes.labels "known" -}}
{{- include "podgpu.knownGpuNodes" . -}}
{{- end -}}
{{- end -}}

{{/* Scheduling of a DaemonSet's pods. */}}
{{- define "podgpu.gpuNodes" -}}
{{- $nodes := .Values.gpuNodes -}}
{{- $selector := dict "kubernetes.io/os" "linux" -}}
{{- if eq $nodes.labels "hardware-type" -}}
{{- $_ := set $selector "hardware-type" "NVIDIAGPU" -}}
{{- end -}}
nodeSelector:
  {{- toYaml (merge (deepCopy $nodes.nodeSelector) $selector) | nindent 2 }}
{{- with include "podgpu.gpuNodes.affinity" . }}
affinity:
  {{- . | nindent 2 }}
{{- end }}
{{- with $nodes.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Environment variables of a container with access to the GPUs. */}}
{{- define "podgpu.gpuEnv" -}}
{{- $gpus := .Values.gpus -}}
{{- if eq $gpus.access "runtime" }}
- {name: NVIDIA_VISIBLE_DEVICES, value: all}
- {name: NVIDIA_DRIVER_CAPABILITIES, value: utility}
{{- else if eq $gpus.access "volume-mounts" }}
# Overrides `all` in the image, because the mount below selects the devices.
- {name: NVIDIA_VISIBLE_DEVICES, value: void}
- {name: NVIDIA_DRIVER_CAPABILITIES, value: utility}
{{- else if eq $gpus.access "cdi" }}
- {name: NVIDIA_VISIBLE_DEVICES, value: {{ $gpus.cdi.device | quote }}}
- {name: NVIDIA_DRIVER_CAPABILITIES, value: utility}
{{- else }}
- {name: LD_LIBRARY_PATH, value: {{ $gpus.driverRoot.libraryPath | quote }}}
{{- end }}
{{- if $gpus.migMonitoring }}
- {name: NVIDIA_MIG_MONITOR_DEVICES, value: all}
{{- end }}
{{- end -}}

{{- define "podgpu.gpuMounts" -}}
{{- $gpus := .Values.gpus -}}
{{- if eq $gpus.access "volume-mounts" }}
- {name: visible-devices, mountPath: /var/run/nvidia-container-devices/all}
{{- else if eq $gpus.access "driver-root" }}
- {name: driver-root, mountPath: {{ $gpus.driverRoot.mountPath }}, readOnly: true}
{{- end }}
{{- end -}}

{{- define "podgpu.gpuVolumes" -}}
{{- $gpus := .Values.gpus -}}
{{- if eq $gpus.access "volume-mounts" }}
- {name: visible-devices, hostPath: {path: /dev/null}}
{{- else if eq $gpus.access "driver-root" }}
- {name: driver-root, hostPath: {path: {{ $gpus.driverRoot.hostPath }}, type: Directory}}
{{- end }}
{{- end -}}
