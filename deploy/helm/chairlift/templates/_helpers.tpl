{{- define "chairlift.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{/* 45: with -engine and a revision's hash of 11 characters it is a label of pods, which may have 63. Names of Services have no dots,
those of releases may. */}}
{{- define "chairlift.fullname" -}}
{{- $name := .Values.fullnameOverride }}
{{- if not $name }}
{{- $chart := include "chairlift.name" . }}
{{- $name = contains $chart .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $chart) }}
{{- end }}
{{- $name | replace "." "-" | trunc 45 | trimSuffix "-" }}
{{- end }}

{{- define "chairlift.frontend" -}}
{{ include "chairlift.fullname" . }}-frontend
{{- end }}

{{- define "chairlift.engine" -}}
{{ include "chairlift.fullname" . }}-engine
{{- end }}

{{/* Engines of several pods each. The LeaderWorkerSet's controller makes a Service of this name, so it is not the engines' own. The
label's hash follows the number of a group here. */}}
{{- define "chairlift.engineGroups" -}}
{{ include "chairlift.fullname" . | trunc 35 | trimSuffix "-" }}-engine-group
{{- end }}

{{/* What has the engines: the target of autoscalers. */}}
{{- define "chairlift.engineOwner" -}}
{{- if gt (int .Values.engine.hosts) 1 -}}
{apiVersion: leaderworkerset.x-k8s.io/v1, kind: LeaderWorkerSet, name: {{ include "chairlift.engineGroups" . }}}
{{- else -}}
{apiVersion: apps/v1, kind: StatefulSet, name: {{ include "chairlift.engine" . }}}
{{- end }}
{{- end }}

{{/* The name of the engines' headless Service, without the dot at its end: that of their certificate too. */}}
{{- define "chairlift.engineHost" -}}
{{ include "chairlift.engine" . }}.{{ .Release.Namespace }}.svc.{{ .Values.clusterDomain }}
{{- end }}

{{/* Labels that select the pods of one half: (dict "root" $ "component" "engine") */}}
{{- define "chairlift.selectorLabels" -}}
app.kubernetes.io/name: {{ include "chairlift.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "chairlift.labels" -}}
{{ include "chairlift.selectorLabels" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end }}

{{/* (dict "root" $ "image" .Values.engine.image) */}}
{{- define "chairlift.image" -}}
{{- if .image.digest -}}
{{ .image.repository }}@{{ .image.digest }}
{{- else -}}
{{ .image.repository }}:{{ default .root.Chart.AppVersion .image.tag }}
{{- end }}
{{- end }}

{{/* A map of flags as a list of arguments. Whole numbers of YAML are floats here, which would print as 1e+06. */}}
{{- define "chairlift.flags" -}}
{{- range $name, $value := . }}
{{- $values := kindIs "slice" $value | ternary $value (list $value) }}
{{- range $each := $values }}
{{- if kindIs "bool" $each }}
- --{{ $each | ternary "" "no-" }}{{ $name }}
{{- else if and (kindIs "float64" $each) (eq (floor $each) $each) }}
- {{ printf "--%s=%d" $name (int64 $each) | quote }}
{{- else }}
- {{ printf "--%s=%v" $name $each | quote }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* What every pod has. enableServiceLinks: a Service named chairlift would set CHAIRLIFT_PORT, which is a flag's variable. */}}
{{- define "chairlift.pod" -}}
serviceAccountName: {{ include "chairlift.fullname" . }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "chairlift.containerSecurity" -}}
readOnlyRootFilesystem: true
allowPrivilegeEscalation: false
privileged: false
capabilities: {drop: [ALL]}
{{- end }}

{{/* Where pods run: (dict "root" $ "component" "engine" "values" .Values.engine) */}}
{{- define "chairlift.placement" -}}
{{- with .values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
topologySpreadConstraints:
{{- if .values.topologySpreadConstraints }}
{{- toYaml .values.topologySpreadConstraints | nindent 2 }}
{{- else }}
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{- include "chairlift.selectorLabels" . | nindent 8 }}
{{- end }}
{{- end }}

{{- define "chairlift.engineTlsSecret" -}}
{{- if .Values.tls.certManager.enabled }}{{ include "chairlift.engine" . }}-tls{{ else }}{{ .Values.tls.engineSecretName }}{{ end }}
{{- end }}

{{- define "chairlift.frontendTlsSecret" -}}
{{- if .Values.tls.certManager.enabled }}{{ include "chairlift.frontend" . }}-engine-tls{{ else }}{{ .Values.tls.frontendSecretName }}{{ end }}
{{- end }}

{{- define "chairlift.metricsPrefix" -}}
{{- index .Values.frontend.flags "metrics-prefix" | default "chairlift" }}
{{- end }}

{{/* PromQL. The matchers are those of the labels that a ServiceMonitor adds. `or vector(0)`: without requests there is no time. */}}
{{- define "chairlift.queueTimeQuery" -}}
(histogram_quantile(0.9, sum by (le) (rate({{ .prefix }}:request_queue_time_seconds_bucket{ {{- .matchers -}} }[2m]))) >= 0) or vector(0)
{{- end }}

{{- define "chairlift.kvCacheQuery" -}}
max({{ .prefix }}:endpoint_kv_cache_usage_perc{ {{- .matchers -}} }) or vector(0)
{{- end }}

{{- define "chairlift.matchers" -}}
namespace="{{ .Release.Namespace }}",service="{{ include "chairlift.frontend" . }}"
{{- end }}
