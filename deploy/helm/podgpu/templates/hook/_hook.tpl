{{/* Arguments of `podgpu hook`, and its two directories on the host. */}}

{{- define "podgpu.hook.podlistDirectory" -}}
{{- .Values.hook.podlistDirectory | default (printf "%s/pod-resources" .Values.kubeletRoot) -}}
{{- end -}}

{{/* Needs no GPU, but reads the numbers of GPUs in /proc/driver/nvidia. `void` keeps NVIDIA's runtime from hiding that directory. */}}
{{- define "podgpu.hook.env" -}}
{{- $hook := .Values.hook -}}
- {name: PODGPU_NRI_SOCKET, value: {{ printf "/var/run/nri/%s" (base $hook.nriSocket) | quote }}}
- {name: PODGPU_HOOK_LISTEN, value: {{ printf ":%v" $hook.port | quote }}}
- {name: PODGPU_HOOK_INJECT, value: {{ $hook.inject | quote }}}
- {name: NVIDIA_VISIBLE_DEVICES, value: void}
{{- end -}}

{{/* Checks that the schema cannot express. */}}
{{- define "podgpu.hook.check" -}}
{{- $hook := .Values.hook -}}
{{- range $flag, $value := dict "--socket" "hook.nriSocket" "--podlist" "hook.podlistDirectory" "--address" "hook.port" "-a" "hook.port" "--inject" "hook.inject" -}}
{{- range $hook.arguments -}}
{{- if or (eq (toString .) $flag) (hasPrefix (printf "%s=" $flag) (toString .)) -}}
{{- fail (printf "hook.arguments: %s needs more than a flag; use %s" $flag $value) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $kubernetes := .Values.exporter.kubernetes -}}
{{- $reads := $kubernetes.podlistDirectory | default (printf "%s/pod-resources" .Values.kubeletRoot) -}}
{{- $writes := include "podgpu.hook.podlistDirectory" . -}}
{{- if and .Values.exporter.enabled $kubernetes.enabled (ne $reads $writes) -}}
{{- fail (printf "the hook writes podlist.json in %s and the exporter reads it in %s: make hook.podlistDirectory and exporter.kubernetes.podlistDirectory the same" $writes $reads) -}}
{{- end -}}
{{- end -}}
