{{/* Names of alerts and files that are left out: a name that is not there would leave nothing out, and nobody would know. */}}

{{- define "podgpu.rules.check" -}}
{{- $alerts := list -}}
{{- range $path, $_ := .Files.Glob "files/rules/*.yaml" -}}
{{- range ($.Files.Get $path | fromYaml).groups -}}
{{- range .rules -}}
{{- with .alert }}{{ $alerts = append $alerts . }}{{ end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range .Values.rules.disabled -}}
{{- if not (has . $alerts) -}}
{{- fail (printf "rules.disabled: there is no alert %s; there are %s" . (join ", " $alerts)) -}}
{{- end -}}
{{- end -}}
{{- include "podgpu.excluded.check" (list . "rules" "files/rules/*.yaml") -}}
{{- end -}}

{{/* (list root value pattern) */}}
{{- define "podgpu.excluded.check" -}}
{{- $files := list -}}
{{- range $path, $_ := (index . 0).Files.Glob (index . 2) }}{{ $files = append $files (base $path) }}{{ end -}}
{{- $value := index . 1 -}}
{{- range (index (index . 0).Values $value).exclude -}}
{{- if not (has . $files) -}}
{{- fail (printf "%s.exclude: there is no file %s; there are %s" $value . (join ", " $files)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
