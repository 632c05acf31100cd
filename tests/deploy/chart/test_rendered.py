"""What helm makes of the chart: valid for Kubernetes, accepted by the programs, locked down, and drained in time."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from chairlift.service.service_classes import read_service_classes
from engine.config import parse_config
from engine.parallel.layout import RankLayout
from frontend.config import parse_arguments
from frontend.routing.resolver import name_and_port
from tests.deploy.monitoring import promql
from tests.support import chart_tools

HALVES = ("engine", "frontend")
# Objects of other projects, whose schemas are not Kubernetes' own.
CUSTOM = {
    ("cert-manager.io/v1", "Certificate"),
    ("inference.networking.k8s.io/v1", "InferencePool"),
    ("keda.sh/v1alpha1", "ScaledObject"),
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"),
    ("monitoring.coreos.com/v1", "PrometheusRule"),
    ("monitoring.coreos.com/v1", "ServiceMonitor"),
}
TLS = {"enabled": True, "engineSecretName": "e", "frontendSecretName": "f"}
Render = Callable[..., Any]


def test_lint_finds_nothing(helm: Any, chart: Path, value_set: Path) -> None:
    done = helm("lint", "--strict", str(chart), f"--values={value_set}")
    assert done.returncode == 0, done.stdout
    assert "[WARNING]" not in done.stdout


@pytest.mark.sampled
@pytest.mark.parametrize("version", chart_tools.KUBERNETES_VERSIONS)
def test_objects_are_valid_for_kubernetes(render: Render, value_set: Path, version: str) -> None:
    manifests = render(value_set).manifests
    try:
        schemas = chart_tools.KubernetesSchemas.of(version)
    except chart_tools.NotAvailableError as error:
        pytest.skip(str(error))
    own = [manifest for manifest in manifests if (manifest["apiVersion"], manifest["kind"]) not in CUSTOM]
    assert {manifest["kind"] for manifest in own} >= {"Deployment", "Service"}
    own += [as_pod(template) for template in groups_of(manifests)]
    wrong = {f"{one['kind']} {one['metadata']['name']}": schemas.errors(one) for one in own}
    assert {name: errors for name, errors in wrong.items() if errors} == {}


def groups_of(manifests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The templates of pods in objects whose schemas are not Kubernetes' own."""
    groups = [one["spec"]["leaderWorkerTemplate"] for one in manifests if one["kind"] == "LeaderWorkerSet"]
    return [group[name] for group in groups for name in ("leaderTemplate", "workerTemplate")]


def as_pod(template: dict[str, Any]) -> dict[str, Any]:
    """A pod of a template."""
    return {"apiVersion": "v1", "kind": "Pod", **template, "metadata": {"name": "any", **template["metadata"]}}


def test_value_sets_make_every_custom_object(render: Render, chart: Path) -> None:
    made = {
        (manifest["apiVersion"], manifest["kind"])
        for file in (chart / "ci").glob("*.yaml")
        for manifest in render(file).manifests
    }
    assert made >= CUSTOM


def test_schema_check_finds_a_field_that_does_not_exist() -> None:
    try:
        schemas = chart_tools.KubernetesSchemas.of(chart_tools.KUBERNETES_VERSIONS[0])
    except chart_tools.NotAvailableError as error:
        pytest.skip(str(error))
    budget = {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "spec": {"maxUnavailabel": 1}}
    assert any("maxUnavailabel" in error for error in schemas.errors(budget))


def test_programs_accept_their_arguments(render: Render, value_set: Path) -> None:
    chart = render(value_set)
    engine = parse_config(chart.container("engine")["args"], {})
    frontend = parse_arguments(chart.container("frontend")["args"], {})
    assert (engine.host, engine.port, frontend.host, frontend.port) == ("0.0.0.0", 50052, "0.0.0.0", 50051)
    values = yaml.safe_load(value_set.read_text())
    for half, config in (("engine", engine), ("frontend", frontend)):
        for flag, value in values[half].get("flags", {}).items():
            name = flag.replace("-", "_")
            given = getattr(config, name) if hasattr(config, name) else getattr(config, f"{name}_s")
            assert given == (tuple(value) if isinstance(value, list) else value), flag


def test_frontends_look_up_the_engines_own_service(render: Render, value_set: Path) -> None:
    chart = render(value_set)
    (address,) = parse_arguments(chart.container("frontend")["args"], {}).engine
    assert (found := name_and_port(address)) is not None
    (service,) = [one for one in chart.of("Service") if one["spec"].get("clusterIP") == "None"]
    assert found == (f"{service['metadata']['name']}.llm.svc.cluster.local.", 50052)  # the dot: no search domain
    assert service["spec"]["publishNotReadyAddresses"] is True
    selector, labels = dict(service["spec"]["selector"]), chart.template("engine")["metadata"]["labels"]
    if chart.has_groups:  # its controller makes a Service with the name of the set, and the label
        assert chart.owner("engine")["metadata"]["name"] != service["metadata"]["name"]
        assert selector.pop("leaderworkerset.sigs.k8s.io/worker-index") == "0"
    else:
        assert chart.owner("engine")["spec"]["serviceName"] == service["metadata"]["name"]
    assert selector.items() <= labels.items()


def test_pods_are_locked_down(render: Render, value_set: Path) -> None:
    chart = render(value_set)
    halves = (*HALVES, "worker") if chart.has_groups else HALVES
    for pod in [*map(chart.pod, halves), *[one["spec"] for one in chart.of("Pod")]]:
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] == 10001
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
        (container,) = pod["containers"]
        assert container["securityContext"] == {
            "readOnlyRootFilesystem": True,
            "allowPrivilegeEscalation": False,
            "privileged": False,
            "capabilities": {"drop": ["ALL"]},
        }
        writable = [volume for volume in pod.get("volumes", []) if "emptyDir" in volume]
        assert all("sizeLimit" in volume["emptyDir"] for volume in writable)
        assert not any("hostPath" in volume for volume in pod.get("volumes", []))


def test_variables_of_services_cannot_become_flags(render: Render, value_set: Path) -> None:
    # A Service chairlift, or chairlift-engine, would set CHAIRLIFT_PORT or CHAIRLIFT_ENGINE_PORT to tcp://...
    assert all(render(value_set).pod(half)["enableServiceLinks"] is False for half in HALVES)


def test_drain_fits_into_the_grace_period(render: Render, value_set: Path) -> None:
    chart = render(value_set, engine__shutdownTimeoutSeconds=77, frontend__preStopSeconds=55)
    engine, frontend = chart.pod("engine"), chart.pod("frontend")
    drain_s = parse_config(chart.container("engine")["args"], {}).shutdown_timeout_s
    assert drain_s == 77
    assert engine["terminationGracePeriodSeconds"] >= drain_s + 5
    drain_s = parse_arguments(chart.container("frontend")["args"], {}).shutdown_timeout_s
    pre_stop = chart.container("frontend")["lifecycle"]["preStop"]["exec"]["command"]
    assert pre_stop == ["sleep", "55"]
    age_s = parse_arguments(chart.container("frontend")["args"], {}).max_connection_age_s
    assert 1.1 * age_s < 55, "gRPC adds up to a tenth: a connection that is left at SIGTERM gets errors"
    assert frontend["terminationGracePeriodSeconds"] >= 55 + drain_s + 5


def test_rolling_updates_never_take_a_frontend_before_its_successor_serves(render: Render, value_set: Path) -> None:
    (deployment,) = render(value_set).of("Deployment")
    assert deployment["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}


def test_probes_ask_grpc_health(render: Render) -> None:
    chart = render()
    engine, frontend = chart.container("engine"), chart.container("frontend")
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert engine[probe]["grpc"] == {"port": 50052}
    assert frontend["startupProbe"]["grpc"] == frontend["livenessProbe"]["grpc"] == {"port": 50051, "service": ""}
    assert frontend["readinessProbe"]["grpc"] == {"port": 50051, "service": "chairlift.v1.GenerationService"}
    startup = engine["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 3600


def test_engine_with_mutual_tls_is_probed_with_its_own_certificate(render: Render, chart: Path) -> None:
    made = render(chart / "ci" / "oci-image-tls-values.yaml")
    container = made.container("engine")
    config = parse_config(container["args"], {})
    (mount,) = [one for one in container["volumeMounts"] if one["name"] == "tls"]
    files = {"tls.crt": config.tls_cert, "tls.key": config.tls_key, "ca.crt": config.tls_client_ca}
    assert {name: str(path) for name, path in files.items()} == {name: f"{mount['mountPath']}/{name}" for name in files}
    assert not config.insecure_bind
    certificates = {one["spec"]["secretName"]: one["spec"] for one in made.of("Certificate")}
    volumes = {half: {one["name"]: one for one in made.pod(half)["volumes"]} for half in HALVES}
    engine = certificates[volumes["engine"]["tls"]["secret"]["secretName"]]
    frontend = certificates[volumes["frontend"]["engine-tls"]["secret"]["secretName"]]
    (address,) = parse_arguments(made.container("frontend")["args"], {}).engine
    assert (found := name_and_port(address)) is not None
    assert engine["dnsNames"] == [found[0].rstrip(".")]
    assert {"server auth", "client auth"} <= set(engine["usages"])
    assert "client auth" in frontend["usages"]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        command = container[probe]["exec"]["command"]
        assert command[:2] == ["python", "/opt/chairlift/bin/engine_health.py"]
        assert f"--tls-server-name={engine['dnsNames'][0]}" in command
        assert command[-1] == "127.0.0.1:50052"


def test_services_name_the_protocol_that_their_ports_speak(render: Render, value_set: Path) -> None:
    """A service mesh takes a port at its word, and cannot read TLS where HTTP/2 in clear is announced."""
    made = render(value_set)
    values = yaml.safe_load(value_set.read_text())
    has_tls = {"engine": "tls" in values, "frontend": "tls" in values["frontend"]}
    for service in made.of("Service"):
        half = service["metadata"]["labels"]["app.kubernetes.io/component"]
        for port in service["spec"]["ports"]:
            in_clear = "kubernetes.io/h2c" if port["name"] == "grpc" else "http"
            assert port["appProtocol"] == ("https" if has_tls[half] else in_clear)


def test_frontend_with_tls_and_keys_is_not_insecure(render: Render, chart: Path) -> None:
    made = render(chart / "ci" / "oci-image-tls-values.yaml")
    config = parse_arguments(made.container("frontend")["args"], {})
    assert not config.insecure_bind
    assert config.api_key_file is not None
    probe = made.container("frontend")["readinessProbe"]["httpGet"]
    assert probe == {"port": "http", "path": "/health", "scheme": "HTTPS"}


def test_engines_port_is_open_to_frontends_alone(render: Render) -> None:
    chart = render()
    policies = {one["metadata"]["name"].rpartition("-")[2]: one["spec"] for one in chart.of("NetworkPolicy")}
    labels = {half: chart.template(half)["metadata"]["labels"] for half in HALVES}
    for half in HALVES:
        assert policies[half]["podSelector"]["matchLabels"].items() <= labels[half].items()
        assert policies[half]["policyTypes"] == ["Ingress", "Egress"]
    (rule,) = policies["engine"]["ingress"]
    (peer,) = rule["from"]
    assert rule["ports"] == [{"port": 50052, "protocol": "TCP"}]
    assert peer.keys() == {"podSelector"}  # of this namespace
    assert peer["podSelector"]["matchLabels"].items() <= labels["frontend"].items()
    assert not peer["podSelector"]["matchLabels"].items() <= labels["engine"].items()
    assert policies["engine"]["egress"] == []  # a bundled model needs no hub


def test_clients_of_frontends_can_be_limited(render: Render, chart: Path) -> None:
    made = render(chart / "ci" / "keda-monitoring-values.yaml")
    (policy,) = [one["spec"] for one in made.of("NetworkPolicy") if one["metadata"]["name"].endswith("frontend")]
    (rule,) = policy["ingress"]
    namespaces = [peer["namespaceSelector"]["matchLabels"] for peer in rule["from"] if "namespaceSelector" in peer]
    assert [labels["kubernetes.io/metadata.name"] for labels in namespaces] == ["apps", "monitoring"]
    (test,) = [peer["podSelector"]["matchLabels"] for peer in rule["from"] if "podSelector" in peer]
    (pod,) = made.of("Pod")
    assert test.items() <= pod["metadata"]["labels"].items()
    assert 4318 in [port["port"] for rule in policy["egress"] for port in rule["ports"]]


def test_disruption_budgets_and_spread_select_their_half(render: Render, value_set: Path) -> None:
    chart = render(value_set)
    budgets = {one["metadata"]["name"].rpartition("-")[2]: one["spec"] for one in chart.of("PodDisruptionBudget")}
    for half in HALVES:
        selector = budgets[half]["selector"]
        if half == "frontend" or not chart.has_groups:
            assert selector == chart.owner(half)["spec"]["selector"]
        assert selector["matchLabels"].items() <= chart.template(half)["metadata"]["labels"].items()
        assert budgets[half]["maxUnavailable"] == 1
        (spread,) = chart.pod(half)["topologySpreadConstraints"]
        assert spread["labelSelector"] == selector


def test_model_sources(render: Render, chart: Path) -> None:
    def engine_of(name: str) -> tuple[Any, dict[str, Any]]:
        made = render(chart / "ci" / name)
        container = made.container("engine")
        return container, {volume["name"]: volume for volume in made.pod("engine")["volumes"]}

    container, volumes = engine_of("pvc-classes-values.yaml")
    assert volumes["models"]["persistentVolumeClaim"] == {"claimName": "models", "readOnly": True}
    config = parse_config(container["args"], {})
    assert (config.model, config.served_model_name) == ("/models/Qwen3-0.6B", ("qwen", "qwen3-0.6b"))
    assert {"name": "HF_HUB_OFFLINE", "value": "1"} in container["env"]
    container, volumes = engine_of("oci-image-tls-values.yaml")
    assert volumes["models"]["image"]["reference"] == "registry.example.org/models/qwen3-0.6b:1"
    assert parse_config(container["args"], {}).model == "/models/model"
    container, _ = engine_of("gpu-hub-values.yaml")
    assert parse_config(container["args"], {}).model == "meta-llama/Llama-3.1-8B-Instruct"
    (token,) = [one for one in container["env"] if one["name"] == "HF_TOKEN"]
    assert token["valueFrom"]["secretKeyRef"] == {"name": "hugging-face", "key": "token"}


def test_gpus_of_an_engine_are_its_tensor_parallel_ranks(render: Render, chart: Path) -> None:
    made = render(chart / "ci" / "gpu-hub-values.yaml")
    container, pod = made.container("engine"), made.pod("engine")
    config = parse_config(container["args"], {})
    assert (config.device, config.tensor_parallel_size) == ("cuda", 2)
    assert container["resources"]["limits"] == {"memory": "64Gi", "nvidia.com/gpu": "2"}
    assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in pod["tolerations"]
    assert pod["runtimeClassName"] == "nvidia"
    assert {"name": "shared-memory", "mountPath": "/dev/shm"} in container["volumeMounts"]
    (engines,) = made.of("StatefulSet")
    (claim,) = engines["spec"]["volumeClaimTemplates"]
    assert claim["metadata"]["name"] == "cache"
    assert "cache" not in {volume["name"] for volume in pod["volumes"]}


def test_engine_on_several_hosts_is_a_leader_and_workers(render: Render, chart: Path) -> None:
    made = render(chart / "ci" / "several-hosts-values.yaml")
    assert made.of("StatefulSet") == []
    group = made.owner("engine")["spec"]["leaderWorkerTemplate"]
    assert (group["size"], group["restartPolicy"]) == (2, "RecreateGroupOnPodRestart")
    configs = []
    for half, index in (("engine", "0"), ("worker", "1")):
        container = made.container(half)
        given = {"LWS_LEADER_ADDRESS": "leader.llm", "LWS_WORKER_INDEX": index}  # by its controller
        given |= {one["name"]: "10.0.0.1" for one in container["env"] if one.get("valueFrom", {}).get("fieldRef")}
        config = parse_config([with_variables(argument, given) for argument in container["args"]], {})
        assert config.layout == RankLayout(tensor_size=4, num_stages=2, num_nodes=2)
        assert (config.node_rank, container["resources"]["limits"]["nvidia.com/gpu"]) == (int(index), "4")
        configs.append(config)
    leader, worker = configs
    assert (leader.master_addr, worker.master_addr) == ("10.0.0.1:29500", "leader.llm:29500")
    own = {"node_rank": 0, "master_addr": None}
    assert replace(leader, **own) == replace(worker, **own)
    served = {"ports", "startupProbe", "livenessProbe", "readinessProbe"}
    assert served <= made.container("engine").keys()
    assert not served & made.container("worker").keys()
    assert made.pod("worker")["terminationGracePeriodSeconds"] >= worker.shutdown_timeout_s + 5
    (scaler,) = made.of("HorizontalPodAutoscaler")
    target, owner = scaler["spec"]["scaleTargetRef"], made.owner("engine")
    assert target == {"apiVersion": owner["apiVersion"], "kind": owner["kind"], "name": owner["metadata"]["name"]}


def with_variables(argument: str, values: dict[str, str]) -> str:
    """An argument as Kubernetes passes it: with the values of its variables."""
    return re.sub(r"\$\((\w+)\)", lambda found: values[found[1]], argument)


def test_ranks_on_several_hosts_reach_each_other_and_nobody_else_them(render: Render, chart: Path) -> None:
    made = render(chart / "ci" / "several-hosts-values.yaml")
    (policy,) = [one["spec"] for one in made.of("NetworkPolicy") if one["metadata"]["name"].endswith("engine")]
    (engines,) = [rule for rule in policy["ingress"] if "ports" not in rule]
    (peer,) = engines["from"]
    labels = {half: made.template(half)["metadata"]["labels"] for half in (*HALVES, "worker")}
    allowed = peer["podSelector"]["matchLabels"].items()
    assert [half for half in labels if allowed <= labels[half].items()] == ["engine", "worker"]
    assert {"to": [peer]} in policy["egress"]
    assert 53 in [port["port"] for rule in policy["egress"] for port in rule.get("ports", [])]  # the leader's name


def test_service_classes_reach_the_frontend(render: Render, chart: Path, tmp_path: Path) -> None:
    made = render(chart / "ci" / "pvc-classes-values.yaml")
    (config_map,) = made.of("ConfigMap")
    ((name, text),) = config_map["data"].items()
    path = parse_arguments(made.container("frontend")["args"], {}).service_classes
    assert path is not None
    assert path.name == name
    (tmp_path / name).write_text(text)
    assert list(read_service_classes(tmp_path / name)) == ["chat"]


def test_endpoint_picker_reads_metrics_that_a_frontend_has(render: Render, chart: Path, page: str, prefix: str) -> None:
    made = render(chart / "ci" / "gateway-hpa-values.yaml", frontend__flags={"metrics-prefix": prefix})
    (config_map,) = [one for one in made.of("ConfigMap") if one["metadata"]["name"].endswith("endpoint-picker")]
    plugins = yaml.safe_load(config_map["data"]["chairlift.yaml"])["plugins"]
    (extractor,) = [plugin for plugin in plugins if plugin["type"] == "core-metrics-extractor"]
    (engine,) = extractor["parameters"]["engineConfigs"]
    known = promql.exported(page)
    specs = {key: value for key, value in engine.items() if key.endswith("Spec")}
    assert set(specs.values()) <= known.keys()
    assert len(specs) == 5
    for spec in specs.values():
        assert len(re.findall(rf"^{spec}(?:{{.*}})? ", page, re.MULTILINE)) == 1  # pickers read the first series
    (deployment,) = made.of("Deployment")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert labels["llm-d.ai/engine-type"] == labels["inference.networking.k8s.io/engine-type"] == engine["name"]
    (pool,) = made.of("InferencePool")
    assert pool["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert pool["spec"]["targetPorts"] == [{"number": 8000}]


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"model__source": "hub"}, "model.source is hub: set model.name"),
        ({"model__source": "pvc"}, "model.source is pvc: set model.pvc.claimName"),
        ({"model__source": "image"}, "model.source is image: set model.image.reference"),
        ({"model__name": "x"}, "model.name is x, but model.source is bundled"),
        ({"tls__enabled": True}, "set tls.engineSecretName and tls.frontendSecretName"),
        ({"networkPolicy__enabled": False}, "tls.enabled and networkPolicy.enabled are both false"),
        (
            {"engine": {"hosts": 2, "cache": {"persistent": True}}},
            "engine.hosts is 2 and engine.cache.persistent is true",
        ),
        (
            {"engine__hosts": 2, "tls": TLS, "networkPolicy__enabled": False},
            "engine.hosts is 2 and networkPolicy.enabled is false",
        ),
        ({"engine__autoscaling__kind": "keda"}, "set engine.autoscaling.prometheusAddress"),
        (
            {"engine__autoscaling": {"kind": "hpa", "minReplicas": 9}},
            "engine.autoscaling.minReplicas is 9, above maxReplicas, which is 4",
        ),
        (
            {"frontend__autoscaling": {"enabled": True, "maxReplicas": 1}},
            "frontend.autoscaling.minReplicas is 2, above maxReplicas, which is 1",
        ),
        ({"frontend__preStopSeconds": 35}, "must be at least 1.2 times maxConnectionAgeSeconds, which is 30"),
        ({"frontend__serviceClasses": "[classes.chat]"}, "set frontend.retryTicketKey.secretName"),
        (
            {"frontend": {"serviceClasses": "[classes.chat]", "replicas": 1, "autoscaling": {"enabled": True}}},
            "set frontend.retryTicketKey.secretName",
        ),
        ({"gateway__enabled": True}, "set gateway.endpointPicker.name"),
        (
            {"gateway": {"enabled": True, "endpointPicker": {"name": "e"}}, "frontend__apiKeys__secretName": "s"},
            "endpoint pickers read /metrics without a key",
        ),
        (
            {"monitoring__serviceMonitor__enabled": True, "frontend__apiKeys__secretName": "s"},
            "set monitoring.serviceMonitor.apiKey.secretName to a Secret with one key",
        ),
        (
            {"frontend__flags": {"allow-runtime-lora-updating": True}},
            "set frontend.adminApiKeys.secretName",
        ),
        ({"engine__flags": {"max-num-seq": 1}}, "additional properties 'max-num-seq' not allowed"),
        ({"frontend__replicas": "two"}, "got string, want integer"),
    ],
    ids=str,
)
def test_contradiction_is_one_line(refusal: Callable[..., str], values: dict[str, Any], line: str) -> None:
    (found,) = [text for text in refusal(**values).splitlines() if line in text]
    assert len(found) < 250


def test_one_frontend_needs_no_key_for_its_tickets(render: Render) -> None:
    made = render(frontend={"serviceClasses": "[classes.chat]", "replicas": 1})
    assert parse_arguments(made.container("frontend")["args"], {}).retry_ticket_key_file is None


def test_large_numbers_stay_whole(render: Render) -> None:
    made = render(
        engine__flags={"kv-cache-memory-bytes": 34359738368, "gpu-memory-utilization": 0.85, "lora": ["a=/x"]}
    )
    arguments = made.container("engine")["args"]
    assert {"--kv-cache-memory-bytes=34359738368", "--gpu-memory-utilization=0.85", "--lora=a=/x"} <= set(arguments)
