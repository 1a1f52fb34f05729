{{/* Arguments of `podgpu enrich`, dcgm-exporter and node_exporter. */}}

{{- define "podgpu.enrich.api" -}}
pods: {{ or .Values.enrich.kubernetes.annotations .Values.enrich.kubernetes.dra }}
slices: {{ .Values.enrich.kubernetes.dra }}
configMap: ""
{{- end -}}

{{- define "podgpu.enrich.token" -}}
{{- if or .Values.enrich.kubernetes.annotations .Values.enrich.kubernetes.dra -}} true {{- end -}}
{{- end -}}

{{- define "podgpu.enrich.env" -}}
{{- $enrich := .Values.enrich -}}
- {name: NODE_NAME, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}
- {name: HOST_IP, valueFrom: {fieldRef: {fieldPath: status.hostIP}}}
- {name: DCGM_EXPORTER_KUBERNETES, value: "true"}
{{- if $enrich.kubernetes.oldNames }}
- {name: DCGM_EXPORTER_USE_OLD_NAMESPACE, value: "true"}
{{- end }}
{{- if $enrich.kubernetes.podUid }}
- {name: DCGM_EXPORTER_KUBERNETES_ENABLE_POD_UID, value: "true"}
{{- end }}
{{- if $enrich.kubernetes.dra }}
- {name: KUBERNETES_ENABLE_DRA, value: "true"}
{{- end }}
{{- if not $enrich.seesGpus }}
- {name: NVIDIA_VISIBLE_DEVICES, value: void}
{{- else }}
{{- include "podgpu.gpuEnv" . }}
{{- end }}
{{- end -}}

{{- define "podgpu.enrich.args" -}}
{{- $enrich := .Values.enrich -}}
- {{ printf "--in=%s" (default "http://127.0.0.1:9400/metrics" $enrich.in) | quote }}
- --out=/run/textfile/podgpu.prom
{{- with $enrich.arguments }}
{{ include "podgpu.words" . }}
{{- end }}
{{- end -}}

{{/* Capabilities of a container with access to the GPUs. MIG monitoring needs SYS_ADMIN. */}}
{{- define "podgpu.enrich.capabilities" -}}
{{- if and .Values.enrich.seesGpus .Values.gpus.migMonitoring -}} [SYS_ADMIN] {{- else -}} [] {{- end -}}
{{- end -}}

{{- define "podgpu.enrich.check" -}}
{{- $enrich := .Values.enrich -}}
{{- if and (not $enrich.in) (not $enrich.dcgmExporter.enabled) -}}
{{- fail "enrich.in is empty and enrich.dcgmExporter.enabled is false: set enrich.in to the URL of dcgm-exporter's metrics, such as http://$(HOST_IP):9400/metrics" -}}
{{- end -}}
{{- if and (not $enrich.textfile.hostPath) (not $enrich.nodeExporter.enabled) -}}
{{- fail "enrich.textfile.hostPath is empty and enrich.nodeExporter.enabled is false: the file would have no reader; set enrich.textfile.hostPath to node_exporter's textfile directory" -}}
{{- end -}}
{{- end -}}
