{{/* The Pod Security level that the namespace must allow, and the reason. Empty if `restricted` is enough. */}}
{{- define "podgpu.privilegedFor" -}}
{{- $reasons := list -}}
{{- $exporter := .Values.exporter -}}
{{- $onNodes := or $exporter.enabled .Values.enrich.enabled -}}
{{- if or (and $exporter.enabled $exporter.kubernetes.enabled) .Values.enrich.enabled -}}
{{- $reasons = append $reasons "hostPath (the kubelet's socket)" -}}
{{- end -}}
{{- if .Values.hook.enabled -}}
{{- $reasons = append $reasons "hostPath (the NRI socket and podlist.json's directory)" -}}
{{- end -}}
{{- if and $exporter.enabled (ne $exporter.usage.from "none") -}}
{{- $reasons = append $reasons "hostPID and hostPath (usage of each container)" -}}
{{- end -}}
{{- if and $exporter.enabled $exporter.kubernetes.podUid (eq $exporter.usage.from "none") -}}
{{- $reasons = append $reasons "hostPath (pod uids)" -}}
{{- end -}}
{{- if and $exporter.enabled (or $exporter.extraHostVolumes $exporter.hpcJobMappingDir $exporter.kubernetes.podlistDirectory (hasPrefix "/" $exporter.historyDir)) -}}
{{- $reasons = append $reasons "hostPath (directories you named)" -}}
{{- end -}}
{{- if and $exporter.enabled $exporter.hostNetwork -}}
{{- $reasons = append $reasons "hostNetwork" -}}
{{- end -}}
{{- if and $onNodes (eq .Values.gpus.access "driver-root") -}}
{{- $reasons = append $reasons "privileged and hostPath (gpus.access driver-root)" -}}
{{- end -}}
{{- if and $onNodes (eq .Values.gpus.access "volume-mounts") -}}
{{- $reasons = append $reasons "hostPath (gpus.access volume-mounts)" -}}
{{- end -}}
{{- if and $onNodes .Values.gpus.migMonitoring -}}
{{- $reasons = append $reasons "SYS_ADMIN (gpus.migMonitoring)" -}}
{{- end -}}
{{- if and $exporter.enabled (eq $exporter.usage.from "exact") -}}
{{- $reasons = append $reasons "SYS_ADMIN (exporter.usage.from exact)" -}}
{{- end -}}
{{- if and $exporter.enabled $exporter.xidBlame -}}
{{- $reasons = append $reasons "SYSLOG (exporter.xidBlame)" -}}
{{- end -}}
{{- if and $exporter.enabled $exporter.addCapabilities -}}
{{- $reasons = append $reasons (printf "%s (exporter.addCapabilities)" (join ", " $exporter.addCapabilities)) -}}
{{- end -}}
{{- if and .Values.enrich.enabled .Values.enrich.dcgmExporter.enabled .Values.enrich.dcgmExporter.profiling -}}
{{- $reasons = append $reasons "SYS_ADMIN (enrich.dcgmExporter.profiling)" -}}
{{- end -}}
{{- join "\n" $reasons -}}
{{- end -}}
