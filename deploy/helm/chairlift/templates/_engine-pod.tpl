{{/*
The template of an engine's pods: (dict "root" $ "node" "")

node: empty for an engine of one pod; leader or worker for the first and the other pods of one that spans engine.hosts. A
worker serves nothing, so it has neither port nor probes: it ends by itself with its group.
*/}}
{{- define "chairlift.enginePod" -}}
{{- $root := .root }}
{{- $labels := dict "root" $root "component" "engine" }}
{{- $engine := $root.Values.engine }}
{{- $isGpu := eq $engine.device "cuda" }}
{{- $tls := "/etc/chairlift/tls" }}
metadata:
  labels:
    {{- include "chairlift.labels" $labels | nindent 4 }}
    {{- with $engine.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with $engine.podAnnotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- include "chairlift.pod" $root | nindent 2 }}
  {{- include "chairlift.placement" (merge (dict "values" $engine) $labels) | trim | nindent 2 }}
  {{- with $engine.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- if or $isGpu $engine.tolerations }}
  tolerations:
    {{- with $engine.tolerations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    {{- if $isGpu }}
    - {key: {{ $engine.gpu.resource }}, operator: Exists, effect: NoSchedule}
    {{- end }}
  {{- end }}
  # After SIGTERM the engine drains: running requests get --shutdown-timeout, the unfinished ones fail over. It needs no
  # preStop: its stream tells frontends at once.
  terminationGracePeriodSeconds: {{ add $engine.shutdownTimeoutSeconds 10 }}
  containers:
    - name: engine
      image: {{ include "chairlift.image" (dict "root" $root "image" $engine.image) }}
      imagePullPolicy: {{ $engine.image.pullPolicy }}
      command: [chairlift-engine]
      args:
        - --host=0.0.0.0
        - --port=50052
        - --device={{ $engine.device }}
        - --shutdown-timeout={{ $engine.shutdownTimeoutSeconds }}
        {{- if $isGpu }}
        - --tensor-parallel-size={{ $engine.gpu.count }}
        {{- end }}
        {{- if .node }}
        - --pipeline-parallel-size={{ $engine.hosts }}
        - --nnodes={{ $engine.hosts }}
        {{- if eq .node "leader" }}
        - --master-addr=$(POD_IP):29500 # its own name may not be in the DNS yet
        {{- else }}
        - --master-addr=$(LWS_LEADER_ADDRESS):29500
        - --node-rank=$(LWS_WORKER_INDEX)
        {{- end }}
        {{- end }}
        {{- if eq $root.Values.model.source "hub" }}
        - {{ printf "--model=%s" $root.Values.model.name | quote }}
        {{- else if ne $root.Values.model.source "bundled" }}
        - {{ printf "--model=/models/%s" $root.Values.model.name | trimSuffix "/" | quote }}
        {{- end }}
        {{- with $root.Values.model.servedName }}
        {{- range kindIs "string" . | ternary (list .) . }}
        - {{ printf "--served-model-name=%s" . | quote }}
        {{- end }}
        {{- end }}
        {{- if $root.Values.tls.enabled }}
        - --tls-cert={{ $tls }}/tls.crt
        - --tls-key={{ $tls }}/tls.key
        - --tls-client-ca={{ $tls }}/ca.crt
        {{- else }}
        - --insecure-bind # the NetworkPolicy leaves the port to frontends
        {{- end }}
        {{- include "chairlift.flags" $engine.flags | trim | nindent 8 }}
      {{- $hub := $root.Values.model.hub }}
      env:
        {{- if eq .node "leader" }}
        - name: POD_IP
          valueFrom:
            fieldRef: {fieldPath: status.podIP}
        {{- end }}
        {{- if ne $root.Values.model.source "hub" }}
        - {name: HF_HUB_OFFLINE, value: "1"}
        {{- else }}
        {{- with $hub.endpoint }}
        - {name: HF_ENDPOINT, value: {{ . | quote }}}
        {{- end }}
        {{- if $hub.tokenSecret.name }}
        - name: HF_TOKEN
          valueFrom:
            secretKeyRef: {name: {{ $hub.tokenSecret.name }}, key: {{ $hub.tokenSecret.key }}}
        {{- end }}
        {{- end }}
        {{- with $engine.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- if ne .node "worker" }}
      ports:
        - {name: grpc, containerPort: 50052}
      {{- $check := dict }}
      {{- if $root.Values.tls.enabled }}
      {{- $words := list "python" "/opt/chairlift/bin/engine_health.py" (printf "--tls-ca=%s/ca.crt" $tls) (printf "--tls-cert=%s/tls.crt" $tls) (printf "--tls-key=%s/tls.key" $tls) (printf "--tls-server-name=%s" (include "chairlift.engineHost" $root)) "127.0.0.1:50052" }}
      {{- $check = dict "exec" (dict "command" $words) }}
      {{- else }}
      {{- $check = dict "grpc" (dict "port" 50052) }}
      {{- end }}
      # The engine answers from its first second on, and serves when it has loaded.
      startupProbe:
        {{- toYaml $check | nindent 8 }}
        periodSeconds: 5
        timeoutSeconds: 10
        failureThreshold: {{ div (add $engine.startTimeoutSeconds 4) 5 }}
      # It ends by itself if it hangs: this catches the rest, and is patient with a busy machine.
      livenessProbe:
        {{- toYaml $check | nindent 8 }}
        periodSeconds: 20
        timeoutSeconds: 10
        failureThreshold: 6
      readinessProbe:
        {{- toYaml $check | nindent 8 }}
        periodSeconds: {{ $root.Values.tls.enabled | ternary 15 5 }}
        timeoutSeconds: 10
        failureThreshold: 2
      {{- end }}
      {{- $resources := deepCopy $engine.resources }}
      {{- if $isGpu }}
      {{- $resources = mergeOverwrite $resources (dict "limits" (dict $engine.gpu.resource (toString $engine.gpu.count))) }}
      {{- end }}
      {{- with $resources }}
      resources: {{- toYaml . | nindent 8 }}
      {{- end }}
      securityContext: {{- include "chairlift.containerSecurity" $root | nindent 8 }}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        - {name: cache, mountPath: /var/cache/chairlift}
        {{- if or (eq $root.Values.model.source "pvc") (eq $root.Values.model.source "image") }}
        - {name: models, mountPath: /models, readOnly: true}
        {{- end }}
        {{- if $isGpu }}
        - {name: shared-memory, mountPath: /dev/shm}
        {{- end }}
        {{- if $root.Values.tls.enabled }}
        - {name: tls, mountPath: {{ $tls }}, readOnly: true}
        {{- end }}
  volumes:
    - name: tmp
      emptyDir: {sizeLimit: 256Mi}
    {{- if not $engine.cache.persistent }}
    - name: cache
      emptyDir: {sizeLimit: {{ $engine.cache.size }}}
    {{- end }}
    {{- if eq $root.Values.model.source "pvc" }}
    - name: models
      persistentVolumeClaim: {claimName: {{ $root.Values.model.pvc.claimName }}, readOnly: true}
    {{- else if eq $root.Values.model.source "image" }}
    - name: models
      image: {reference: {{ $root.Values.model.image.reference | quote }}, pullPolicy: {{ $root.Values.model.image.pullPolicy }}}
    {{- end }}
    {{- if $isGpu }}
    - name: shared-memory # of the ranks of one pod
      emptyDir: {medium: Memory, sizeLimit: 1Gi}
    {{- end }}
    {{- if $root.Values.tls.enabled }}
    - name: tls
      secret: {secretName: {{ include "chairlift.engineTlsSecret" $root }}, defaultMode: 0440}
    {{- end }}
{{- end }}
