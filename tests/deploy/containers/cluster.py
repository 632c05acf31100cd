"""The chart's pods as Docker containers, and a balancer in the place of the frontends' Service.

Each container has the command, arguments, variables, user, limits and grace period that helm renders. Docker's name
server answers for the headless Service: its name is an alias of every engine. Not tried here: NetworkPolicies and
whatever else only a cluster enforces.
"""

import contextlib
import json
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import grpc
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc

CHART = Path(__file__).resolve().parents[3] / "deploy" / "helm" / "chairlift"
START_TIMEOUT_S = 300.0  # the first start compiles kernels on busy cores
Docker = Callable[..., str]


def render(helm: Path, **values: Any) -> dict[str, Any]:
    """Returns the chart's objects by kind; of several objects of a kind the last."""
    words = [f"--set-json={path.replace('__', '.')}={json.dumps(value)}" for path, value in values.items()]
    done = subprocess.run(
        [str(helm), "template", "test", str(CHART), "--namespace", "llm", *words],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return {manifest["kind"]: manifest for manifest in yaml.safe_load_all(done.stdout) if manifest}


class Balancer:
    """Forwards TCP connections to the targets in turn, as a Service does: a new target gets new connections only, and
    connections to a removed one go on.
    """

    def __init__(self) -> None:
        self._targets: list[tuple[str, int]] = []
        self._num_accepted = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def set(self, targets: list[tuple[str, int]]) -> None:
        """Replaces the targets."""
        self._targets = list(targets)

    def close(self) -> None:
        """Accepts no more connections."""
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes up the thread that accepts
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            targets = self._targets
            self._num_accepted += 1
            try:
                server = socket.create_connection(targets[self._num_accepted % len(targets)], timeout=5)
            except (OSError, ZeroDivisionError):
                client.close()
                continue
            server.settimeout(None)
            threading.Thread(target=_relay, args=(client, server), daemon=True).start()


def _relay(client: socket.socket, server: socket.socket) -> None:
    """Copies both ways until both ends have closed."""
    with client, server:
        answers = threading.Thread(target=_copy, args=(server, client), daemon=True)
        answers.start()
        _copy(client, server)
        answers.join()


def _copy(source: socket.socket, sink: socket.socket) -> None:
    try:
        while data := source.recv(1 << 16):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)
    except OSError:  # one end is gone: so is the connection
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


class Cluster:
    """Containers of the rendered pods.

    Args:
        docker: runs docker.
        name: prefix of everything that is made.
        manifests: see `render`.
        images: those of engine and frontend.
    """

    def __init__(self, docker: Docker, name: str, manifests: Mapping[str, Any], images: Mapping[str, str]) -> None:
        self._docker, self._name, self._images = docker, name, images
        self._owners = {"engine": manifests["StatefulSet"], "frontend": manifests["Deployment"]}
        self._num_started = 0
        self.pods: dict[str, list[str]] = {"engine": [], "frontend": []}
        self.balancer = Balancer()
        docker("network", "create", name)
        docker("volume", "create", name)

    @property
    def target(self) -> str:
        """Where the load generator sends requests: the frontends' Service."""
        return f"grpc://127.0.0.1:{self.balancer.port}"

    def start(self, half: str) -> str:
        """Starts a pod; returns its name. It is not ready yet."""
        self._num_started += 1
        pod = f"{self._name}-{half}-{self._num_started}"
        spec = self._owners[half]["spec"]["template"]["spec"]
        (container,) = spec["containers"]
        security, user = container["securityContext"], spec["securityContext"]
        assert security["readOnlyRootFilesystem"]
        assert not security["allowPrivilegeEscalation"]
        flags = ["--read-only", "--security-opt=no-new-privileges", f"--user={user['runAsUser']}:{user['runAsGroup']}"]
        flags += [f"--cap-drop={name}" for name in security["capabilities"]["drop"]]
        flags += [f"--stop-timeout={spec['terminationGracePeriodSeconds']}"]
        flags += [f"--memory={container['resources']['limits']['memory'].removesuffix('i').lower()}"]
        flags += [f"--env={one['name']}={one['value']}" for one in container.get("env", [])]
        for mount in container["volumeMounts"]:
            # One cache for all engines, so that only the first one compiles; images for clusters bring their kernels.
            flags += ["--volume", f"{self._name}:{mount['mountPath']}"] if mount["name"] == "cache" else []
            flags += [f"--tmpfs={mount['mountPath']}:size=256m,mode=1777"] if mount["name"] == "tmp" else []
        if half == "engine":
            service = self._owners["engine"]["spec"]["serviceName"]
            flags += [f"--network-alias={service}.llm.svc.cluster.local"]
        command = [*container["command"], *container["args"]]
        self._docker("run", "--detach", "--name", pod, "--network", self._name, *flags, self._images[half], *command)
        self.pods[half].append(pod)
        return pod

    def wait_ready(self, half: str, pod: str) -> None:
        """Waits until the pod's readiness probe succeeds."""
        (container,) = self._owners[half]["spec"]["template"]["spec"]["containers"]
        probe = container["readinessProbe"]["grpc"]
        request = health_pb2.HealthCheckRequest(service=probe.get("service", ""))
        with grpc.insecure_channel(f"{self.address(pod)}:{probe['port']}") as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)

            def is_serving() -> bool:
                try:
                    return bool(stub.Check(request, timeout=5).status == health_pb2.HealthCheckResponse.SERVING)
                except grpc.RpcError:
                    return False

            self.wait_until(is_serving, pod)

    def stop(self, half: str, pod: str) -> None:
        """Ends a pod as Kubernetes does: out of the Service, preStop, SIGTERM. It drains before SIGKILL would come."""
        self.pods[half].remove(pod)
        (container,) = self._owners[half]["spec"]["template"]["spec"]["containers"]
        if half == "frontend":
            self.balance()
        if "lifecycle" in container:
            self._docker("exec", pod, *container["lifecycle"]["preStop"]["exec"]["command"])
        self._docker("stop", pod)
        assert self._docker("inspect", "--format", "{{.State.ExitCode}}", pod).strip() == "0", self.log(pod)
        self._docker("rm", pod)

    def kill(self, half: str, pod: str) -> None:
        """Ends a pod as a lost node does."""
        self.pods[half].remove(pod)
        self._docker("kill", pod)

    def balance(self) -> None:
        """Tells the Service which frontends there are."""
        self.balancer.set([(self.address(pod), 50051) for pod in self.pods["frontend"]])

    def address(self, pod: str) -> str:
        """The address of a running pod."""
        return self._docker(
            "inspect", "--format", "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}", pod
        ).strip()

    def log(self, pod: str) -> str:
        """What a pod has printed."""
        return self._docker("logs", pod)

    def wait_until(self, is_there: Callable[[], bool], pod: str) -> None:
        """Waits for anything; `pod` is whose log tells why it did not come."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while not is_there():
            assert time.monotonic() < deadline, self.log(pod)
            time.sleep(0.2)  # other processes' states are polled; there is nothing to wait on

    def remove(self) -> None:
        """Removes all that was made."""
        self.balancer.close()
        for pod in self._docker("ps", "--all", "--format", "{{.Names}}", "--filter", f"name={self._name}-").split():
            self._docker("rm", "--force", pod)
        self._docker("network", "rm", self._name)
        self._docker("volume", "rm", self._name)
