{{- define "lorica.name" -}}
{{ .Release.Name | trunc 40 | trimSuffix "-" }}-{{ .part }}
{{- end }}

{{- define "lorica.selector" -}}
app.kubernetes.io/name: lorica
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: {{ .part }}
{{- end }}

{{- define "lorica.labels" -}}
{{ include "lorica.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "lorica.image" -}}
{{- if .digest -}}
{{ .repository }}@{{ .digest }}
{{- else -}}
{{ .repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end }}

{{/* What Kubernetes calls restricted, and a root that cannot be written to. Files of the volume are chowned once, when it is new: afterwards
that would loosen the modes of private keys, which are refused then. */}}
{{- define "lorica.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "lorica.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{/* As the image's own health check: the age of the file that the event loop touches. */}}
{{- define "lorica.alive" -}}
exec:
  command: [sh, -c, 'test -n "$(find {{ .file }} -mmin -1)"']
{{- end }}

{{/* Where a pod may run, and in what. */}}
{{- define "lorica.placement" -}}
{{- with .runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with .nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "lorica.coordinatorMounts" -}}
- {name: state, mountPath: /var/lib/lorica}
- {name: tmp, mountPath: /tmp}
{{- if .passphrase.existingSecret }}
- {name: passphrase, mountPath: /etc/lorica/passphrase, readOnly: true}
{{- end }}
{{- end }}
