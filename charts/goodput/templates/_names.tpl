{{/* The release's name, short enough for suffixes. */}}
{{- define "goodput.name" -}}
{{- if contains "goodput" .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-goodput" .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "goodput.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "goodput.name" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- required "serviceAccount.name: is needed where serviceAccount.create is false" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "goodput.keySecret" -}}
{{- default (printf "%s-key" (include "goodput.name" .)) .Values.operatorKey.existingSecret -}}
{{- end -}}

{{- define "goodput.selector" -}}
app.kubernetes.io/name: goodput-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{/* Labels of the pods of the live page, which no other Service or policy of this chart selects. */}}
{{- define "goodput.pageSelector" -}}
app.kubernetes.io/name: goodput-page
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "goodput.labels" -}}
{{ include "goodput.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/component: operator
app.kubernetes.io/part-of: goodput
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{/* An image: (dict "image" {repository, tag, digest} "root" $). */}}
{{- define "goodput.image" -}}
{{- $repository := .image.repository -}}
{{- with .root.Values.image.registry -}}
{{- $repository = printf "%s/%s" (trimSuffix "/" .) $repository -}}
{{- end -}}
{{- if .image.digest -}}
{{- printf "%s@%s" $repository .image.digest -}}
{{- else -}}
{{- printf "%s:%s" $repository (default .root.Chart.AppVersion .image.tag) -}}
{{- end -}}
{{- end -}}

{{/* Network peers of the admin ports: (dict "root" $ "monitoring" [peers]). */}}
{{- define "goodput.administrators" -}}
- namespaceSelector:
    matchLabels: {kubernetes.io/metadata.name: {{ .root.Release.Namespace }}}
  podSelector:
    matchLabels:
      {{- include "goodput.selector" .root | nindent 6 }}
{{- if .root.Values.page.enabled }}
- namespaceSelector:
    matchLabels: {kubernetes.io/metadata.name: {{ .root.Release.Namespace }}}
  podSelector:
    matchLabels:
      {{- include "goodput.pageSelector" .root | nindent 6 }}
{{- end }}
{{- with .monitoring }}
{{ toYaml . }}
{{- end }}
{{- end -}}
