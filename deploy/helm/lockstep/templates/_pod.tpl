{{- /* Values are dictionaries {root, role}: role is server for a Deployment's pod, leader or worker for a group's. */ -}}

{{- define "lockstep.container.security" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities:
  drop: [ALL]
{{- end -}}

{{- define "lockstep.env" -}}
{{- $root := .root -}}
{{- $own := dict "host" "0.0.0.0" "port" "8000" -}}
{{- if $root.Values.gpu.enabled }}{{ $_ := set $own "device" "cuda" }}{{ end -}}
{{- if ne $root.Values.weights.source "embedded" -}}
{{- $_ := set $own "model_dir" "/models/weights" -}}
{{- $_ := set $own "served_model_name" $root.Values.weights.servedModelName -}}
{{- end -}}
{{- range $name, $value := merge $own $root.Values.settings }}
- name: LOCKSTEP_{{ upper $name }}
  {{- /* a number in a values file arrives as a float: no exponent, and no fraction where there is none */}}
  {{- if kindIs "float64" $value }}
  value: {{ ternary ($value | int64 | toString) ($value | toString) (eq (floor $value) $value) | quote }}
  {{- else }}
  value: {{ $value | toString | quote }}
  {{- end }}
{{- end }}
{{- if ne .role "worker" }}
- name: LOCKSTEP_API_KEY
  valueFrom:
    secretKeyRef:
      name: {{ $root.Values.apiKeysSecret }}
      key: keys
      optional: true
{{- end }}
{{- if ne .role "server" }}
- name: MASTER_ADDR
  value: $(LWS_LEADER_ADDRESS)
- name: MASTER_PORT
  value: "29500"
- name: WORLD_SIZE
  value: $(LWS_GROUP_SIZE)
- name: RANK
  value: $(LWS_WORKER_INDEX)
{{- end }}
{{- end -}}

{{- define "lockstep.resources" -}}
{{- $resources := deepCopy .Values.resources -}}
{{- if .Values.gpu.enabled -}}
{{- range list "requests" "limits" -}}
{{- $_ := set (index $resources .) $.Values.gpu.resource ($.Values.gpu.count | toString) -}}
{{- end -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{- define "lockstep.probes" -}}
startupProbe:
  httpGet:
    path: /health
    port: http
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: {{ div .Values.lifecycle.startupSeconds 10 }}
readinessProbe:
  httpGet:
    path: /ready
    port: http
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 1
livenessProbe: # /live already waits LOCKSTEP_STALL_TIMEOUT before it says no
  httpGet:
    path: /live
    port: http
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
{{- end -}}

{{- define "lockstep.container" -}}
{{- $values := .root.Values -}}
name: lockstep
image: {{ include "lockstep.image" .root }}
imagePullPolicy: {{ $values.image.pullPolicy }}
args: [serve]
env:
  {{- include "lockstep.env" . | trim | nindent 2 }}
{{- if ne .role "worker" }}
ports:
  - name: http
    containerPort: 8000
    protocol: TCP
{{- include "lockstep.probes" .root | nindent 0 }}
lifecycle:
  preStop:
    sleep:
      seconds: {{ $values.lifecycle.preStopSeconds }}
{{- end }}
resources:
  {{- include "lockstep.resources" .root | nindent 2 }}
securityContext:
  {{- include "lockstep.container.security" . | nindent 2 }}
volumeMounts:
  - name: cache
    mountPath: /var/cache/lockstep
  - name: tmp
    mountPath: /tmp
  {{- if $values.gpu.enabled }}
  - name: shm
    mountPath: /dev/shm
  {{- end }}
  {{- if ne $values.weights.source "embedded" }}
  - name: weights
    mountPath: /models/weights
    readOnly: true
  {{- end }}
{{- end -}}

{{- define "lockstep.fetch" -}}
name: fetch
image: {{ include "lockstep.image" .root }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
args:
  - fetch
  - {{ required "weights.download.url is needed" .root.Values.weights.download.url }}
  - /models/weights
  - --sums=/etc/lockstep/weights/SHA256SUMS
resources:
  {{- toYaml .root.Values.weights.download.resources | nindent 2 }}
securityContext:
  {{- include "lockstep.container.security" . | nindent 2 }}
volumeMounts:
  - name: weights
    mountPath: /models/weights
  - name: sums
    mountPath: /etc/lockstep/weights
    readOnly: true
{{- end -}}

{{- define "lockstep.volumes" -}}
- name: cache
  emptyDir:
    sizeLimit: {{ .Values.cacheSize }}
- name: tmp
  emptyDir:
    sizeLimit: 256Mi
{{- if .Values.gpu.enabled }}
- name: shm
  emptyDir:
    medium: Memory
    sizeLimit: {{ .Values.gpu.sharedMemory }}
{{- end }}
{{- with .Values.weights }}
{{- if eq .source "pvc" }}
- name: weights
  persistentVolumeClaim:
    claimName: {{ .pvc.claimName }}
    readOnly: true
{{- else if eq .source "image" }}
- name: weights
  image:
    reference: {{ required "weights.image.reference is needed" .image.reference }}
    pullPolicy: {{ .image.pullPolicy }}
{{- else if eq .source "download" }}
- name: weights
  emptyDir:
    sizeLimit: {{ .download.size }}
- name: sums
  configMap:
    name: {{ include "lockstep.name" $ }}-weights
{{- end }}
{{- end }}
{{- end -}}

{{- define "lockstep.pod" -}}
{{- $root := .root -}}
{{- $values := $root.Values -}}
serviceAccountName: {{ include "lockstep.name" $root }}
automountServiceAccountToken: false
# The links for a Service called lockstep would set LOCKSTEP_PORT=tcp://..., which is the server's --port.
enableServiceLinks: false
# More than preStop, the drain and the 15 s that the server takes at most to end after it.
terminationGracePeriodSeconds: {{ add $values.lifecycle.preStopSeconds (ceil $values.settings.drain_timeout | int) 30 }}
{{- with $values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile:
    type: RuntimeDefault
{{- if eq .role "server" }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "lockstep.selector" $root | nindent 8 }}
{{- end }}
{{- $tolerations := $values.tolerations }}
{{- if $values.gpu.enabled }}
{{- $tolerations = prepend $tolerations (dict "key" $values.gpu.resource "operator" "Exists" "effect" "NoSchedule") }}
{{- end }}
{{- with $tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if eq $values.weights.source "download" }}
initContainers:
  - {{ include "lockstep.fetch" . | nindent 4 | trim }}
{{- end }}
containers:
  - {{ include "lockstep.container" . | nindent 4 | trim }}
volumes:
  {{- include "lockstep.volumes" $root | nindent 2 }}
{{- end -}}
