{{/* Values of the charts 0.1 and 0.2 -> what to use now. The schema allows these names, so that this message is shown. */}}

{{- define "podgpu.moved" -}}
logRoot: "remove it: /var/log is used"
exporter.interval: "exporter.arguments, as [-c, 30s]"
exporter.kubernetes.resourceNames: "exporter.arguments, as [--nvidia-resource-names, NAME]"
exporter.containerUsage: "exporter.usage.from, with none instead of enabled: false"
exporter.webConfig.key: "remove it: the key in the Secret is web-config.yml"
exporter.webConfig.probePort: "remove it: the port of probes is 9402"
exporter.service.internalTrafficPolicy: "remove it: the Service is for the whole cluster"
cluster.interval: "cluster.arguments, as [--interval, 15s]"
cluster.extraConfigMapVolumes: "cluster.prices for prices; there is no other use"
cluster.extraVolumeMounts: "cluster.prices for prices; there is no other use"
cluster.webConfig.key: "remove it: the key in the Secret is web-config.yml"
cluster.webConfig.probePort: "remove it: the port of probes is 9402"
cluster.podDisruptionBudget: "remove it: one pod at a time may be evicted"
autoscale.interval: "autoscale.arguments, as [--interval, 15s]"
autoscale.longestWindow: "autoscale.arguments, as [--longest-window, 10m]"
autoscale.probePort: "remove it: the port is fixed"
autoscale.keda.port: "remove it: the port is 9411"
autoscale.customMetrics.port: "remove it: the port is fixed"
autoscale.externalMetrics: "remove it: KEDA serves the external metrics API (autoscale.keda)"
autoscale.networkPolicy.extraEgress: networkPolicy.extraEgress
enrich.interval: "enrich.arguments, as [--interval, 15s]"
enrich.textfile.name: "remove it: the file is podgpu.prom"
enrich.textfile.mode: "remove it: the mode is 0644"
enrich.nodeExporter.port: "enrich.nodeExporter.hostPort for the node; in the pod it is 9100"
hook.nri: "hook.nriSocket, a path with the socket's name"
rules.exclude: "rules.disabled, with the names of alerts"
dashboards.exclude: "remove it: delete the ConfigMap that you do not need"
{{- range $component := list "exporter" "cluster" "autoscale" "enrich" "hook" }}
{{- range $name := list "monitor" "podAnnotations" "podLabels" "seLinuxOptions" "updateStrategy" "livenessProbe" "readinessProbe" }}
{{ $component }}.{{ $name }}: {{ $name }}
{{- end }}
{{ $component }}.serviceAccount: "remove it: the chart sets it"
{{- if ne $component "autoscale" }}
{{ $component }}.priorityClassName: priorityClassName
{{ $component }}.networkPolicy: networkPolicy
{{- end }}
{{- end }}
{{- range $component := list "cluster" "autoscale" }}
{{- range list "prometheus" "discover" "exporterAccess" }}
{{ $component }}.{{ . }}: source.{{ . }}
{{- end }}
{{- end }}
{{- end -}}

{{/* (list values path): returns "true" if a value is set and not empty. */}}
{{- define "podgpu.isSet" -}}
{{- $found := index . 0 -}}
{{- range splitList "." (index . 1) -}}
{{- if kindIs "map" $found -}}{{- $found = get $found . -}}{{- else -}}{{- $found = "" -}}{{- end -}}
{{- end -}}
{{- if $found -}}true{{- end -}}
{{- end -}}

{{- define "podgpu.moved.check" -}}
{{- $root := . -}}
{{- $lines := list -}}
{{- if kindIs "map" .Values.exporter.counters.configMap -}}
{{- $lines = append $lines "  exporter.counters.configMap -> a text, NAMESPACE:NAME" -}}
{{- end -}}
{{- range $old, $new := include "podgpu.moved" . | fromYaml -}}
{{- if include "podgpu.isSet" (list $root.Values $old) -}}
{{- $lines = append $lines (printf "  %s -> %s" $old $new) -}}
{{- end -}}
{{- end -}}
{{- if $lines -}}
{{- fail (printf "values of podgpu 0.1 and 0.2, and what to use now:\n%s\nhelm --reuse-values passes the old chart's defaults too: use --reset-then-reuse-values" (join "\n" $lines)) -}}
{{- end -}}
{{- end -}}
