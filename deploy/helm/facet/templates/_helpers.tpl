{{- define "facet.labels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "facet.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "facet.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "facet.engines" -}}
{{- add .Values.headless.local (mul .Values.headless.pods .Values.headless.enginesPerPod) -}}
{{- end }}

{{- define "facet.clusterKey" -}}
- name: FACET_CLUSTER_KEY
  valueFrom:
    secretKeyRef:
      name: {{ required "headless.clusterKeySecret names the secret that the pods of one server share" .Values.headless.clusterKeySecret }}
      key: cluster-key
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
{{- end }}

{{- define "facet.volumes" -}}
- name: cache
  {{- if .Values.cache.claim }}
  persistentVolumeClaim: {claimName: {{ .Values.cache.claim }}}
  {{- else }}
  emptyDir: {sizeLimit: {{ .Values.cache.size }}}
  {{- end }}
- name: tmp
  emptyDir: {}
# Ranks and PyTorch share memory here; the default of 64 MB is too little for some.
- name: shm
  emptyDir: {medium: Memory}
{{- end }}

{{- define "facet.mounts" -}}
- {name: cache, mountPath: /home/facet/.cache}
- {name: tmp, mountPath: /tmp}
- {name: shm, mountPath: /dev/shm}
{{- end }}

{{- define "facet.placement" -}}
{{- with .Values.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
