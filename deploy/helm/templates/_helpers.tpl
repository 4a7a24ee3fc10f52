{{- define "radixrt.name" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "radixrt.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "radixrt.labels" -}}
{{ include "radixrt.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "radixrt.tokenSecret" -}}
{{ .Values.joinTokenSecret | default (printf "%s-join" (include "radixrt.name" .)) }}
{{- end -}}

{{/* Component whose pods answer clients. */}}
{{- define "radixrt.front" -}}
{{ if eq .Values.topology "joined" }}ingress{{ else }}engine{{ end }}
{{- end -}}

{{- define "radixrt.hosts" -}}
{{- $name := include "radixrt.name" . -}}
{{- $ns := .Release.Namespace -}}
{{- $own := list $name (printf "%s.%s" $name $ns) (printf "%s.%s.svc" $name $ns) (printf "%s.%s.svc.cluster.local" $name $ns) -}}
{{- join "," (concat $own .Values.allowedHosts) -}}
{{- end -}}

{{/* Flags of all processes. */}}
{{- define "radixrt.commonArgs" -}}
- --model-path={{ .Values.model.path }}
- --port=30000
{{- if eq .Values.topology "joined" }}
- --join-token-file=/secrets/join/token
{{- end }}
{{- end -}}

{{/* Flags of the processes that answer clients. */}}
{{- define "radixrt.frontArgs" -}}
- --allowed-hosts={{ include "radixrt.hosts" . }}
- --metrics-compat=vllm
- --shutdown-grace={{ .Values.shutdownGrace }}
{{- with .Values.model.servedName }}
- --served-model-name={{ . }}
{{- end }}
{{- if .Values.apiKeysSecret }}
- --api-keys=/secrets/keys/keys.toml
{{- end }}
{{- end -}}

{{/* The pod of a component. Arguments: root, component, args (text), settings (of the component), front (answers clients). */}}
{{- define "radixrt.pod" -}}
{{- $root := .root -}}
{{- $values := $root.Values -}}
metadata:
  labels:
    {{- include "radixrt.labels" $root | nindent 4 }}
    app.kubernetes.io/component: {{ .component }}
  {{- if .front }}
  annotations:
    prometheus.io/scrape: "true"
    prometheus.io/port: "30000"
  {{- end }}
spec:
  serviceAccountName: {{ include "radixrt.name" $root }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ ternary (add $values.shutdownGrace $values.preStopSeconds 15) 30 .front }}
  securityContext:
    runAsNonRoot: true
    runAsUser: 1000
    runAsGroup: 1000
    fsGroup: 1000
    seccompProfile: {type: RuntimeDefault}
  {{- with $values.imagePullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .settings.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .settings.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- if eq .component "engine" }}
  topologySpreadConstraints:
    - maxSkew: 1
      topologyKey: kubernetes.io/hostname
      whenUnsatisfiable: ScheduleAnyway
      labelSelector:
        matchLabels:
          {{- include "radixrt.selector" $root | nindent 10 }}
          app.kubernetes.io/component: engine
  {{- end }}
  containers:
    - name: radixrt
      image: "{{ $values.image.repository }}:{{ $values.image.tag | default $root.Chart.AppVersion }}"
      imagePullPolicy: {{ $values.image.pullPolicy }}
      args:
        {{- .args | nindent 8 }}
        {{- with .settings.extraArgs }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      env:
        - {name: HF_HOME, value: /models}
        - {name: HOME, value: /tmp}
        {{- if $values.model.existingClaim }}
        - {name: HF_HUB_OFFLINE, value: "1"}
        {{- end }}
      ports:
        - {name: http, containerPort: 30000}
        {{- if eq .component "ingress" }}
        - {name: join, containerPort: 30100}
        {{- end }}
      securityContext:
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        capabilities: {drop: [ALL]}
      startupProbe:
        httpGet: {path: /health, port: http}
        periodSeconds: 5
        failureThreshold: {{ div $values.engine.startupSeconds 5 }}
      readinessProbe:
        httpGet: {path: /ready, port: http}
        periodSeconds: 2
        timeoutSeconds: 5
        failureThreshold: 1
      livenessProbe:
        httpGet: {path: /health, port: http}
        periodSeconds: 10
        timeoutSeconds: 10
        failureThreshold: 6
      {{- if .front }}
      lifecycle:
        preStop:
          sleep: {seconds: {{ $values.preStopSeconds }}}
      {{- end }}
      {{- $resources := deepCopy .settings.resources }}
      {{- if and (eq .component "engine") $values.engine.gpus }}
      {{- $gpus := dict "limits" (dict "nvidia.com/gpu" $values.engine.tensorParallel) }}
      {{- $resources = merge $gpus $resources }}
      {{- end }}
      resources:
        {{- toYaml $resources | nindent 8 }}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        - {name: shm, mountPath: /dev/shm}
        - {name: models, mountPath: /models{{ if $values.model.existingClaim }}, readOnly: true{{ end }}}
        {{- if eq $values.topology "joined" }}
        - {name: join, mountPath: /secrets/join, readOnly: true}
        {{- end }}
        {{- if and .front $values.apiKeysSecret }}
        - {name: keys, mountPath: /secrets/keys, readOnly: true}
        {{- end }}
  volumes:
    - {name: tmp, emptyDir: {}}
    - {name: shm, emptyDir: {medium: Memory}}
    - name: models
      {{- if $values.model.existingClaim }}
      persistentVolumeClaim: {claimName: {{ $values.model.existingClaim }}, readOnly: true}
      {{- else }}
      emptyDir: {sizeLimit: {{ $values.model.cacheSize }}}
      {{- end }}
    {{- if eq $values.topology "joined" }}
    - name: join
      secret: {secretName: {{ include "radixrt.tokenSecret" $root }}, defaultMode: 0440}
    {{- end }}
    {{- if and .front $values.apiKeysSecret }}
    - name: keys
      secret: {secretName: {{ $values.apiKeysSecret }}, defaultMode: 0440}
    {{- end }}
{{- end -}}
