{{/* Fails for names of alerts that do not exist. */}}

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
{{- end -}}
