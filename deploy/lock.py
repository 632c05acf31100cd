"""`make lock`: writes the lock files of the images, with the hash of every package, and their base image's digest.

    deploy/lock/build.txt                    what builds Chairlift's wheel
    deploy/lock/EXTRAS.txt                   dependencies of an image, by its extras (`frontend-engines-otel`)
    deploy/lock/ENGINE-gpu.txt               what an engine needs on a GPU alone: Triton and CUDA's libraries
    deploy/lock/torch.txt                    torch, with hashes of both its sources: pypi.org and PyTorch's CPU builds

Names and hashes are those of pypi.org, whatever index pip or uv is configured with here. What cannot be reached is
named, and stays as it was.
"""

import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterable, Sequence
from pathlib import Path

from requirements import requirements

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "deploy" / "lock"
PYTHON = "3.11"
IMAGES = (("engine", "engines", "gguf", "transformers"), ("frontend", "engines", "otel"), ("loadgen",))
BUILD = ["setuptools>=77", "wheel"]
PACKAGE_INDEX = "https://pypi.org/simple"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
BASE_IMAGE = "library/python", "3.11-slim"
_TIMEOUT_S = 10.0

_GPU_ONLY = re.compile(r"(nvidia-|cuda-|triton)")
_ENTRY = re.compile(r"^(\S+?)==(\S+)[^\n]*(?:\n[ \t]+[^\n]*)*", re.MULTILINE)
_HASH = re.compile(r"--hash=(sha256:[0-9a-f]{64})")
_MANIFESTS = "application/vnd.oci.image.index.v1+json, application/vnd.docker.distribution.manifest.list.v2+json"


def main(argv: Sequence[str]) -> int:
    """Renews everything that can be reached; returns 1 if something could not be.

    Args:
        argv: further indexes that torch may come from.
    """
    unreached: list[str] = []
    FOLDER.mkdir(exist_ok=True)
    write("build", entries(compiled(BUILD)))
    for extras in IMAGES:
        locked = entries(compiled(requirements(ROOT / "pyproject.toml", list(extras))))
        torch = [entry for entry in locked if entry.startswith("torch==")]
        gpu = [entry for entry in locked if _GPU_ONLY.match(entry)]
        write("-".join(extras), (entry for entry in locked if entry not in torch and entry not in gpu))
        if torch:
            write("-".join((*extras, "gpu")), gpu)
            indexes = [TORCH_CPU_INDEX, *argv]
            write("torch", [with_hashes(entry, torch_hashes(entry, indexes, unreached)) for entry in torch])
    pin_base_image(unreached)
    for reason in unreached:
        print(f"lock.py: not renewed: {reason}", file=sys.stderr)
    return 1 if unreached else 0


def compiled(wanted: list[str]) -> str:
    """Returns the lock file that uv resolves these to, for every platform."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "--no-config", "--quiet", "--universal"]
    command += ["--python-version", PYTHON, "--generate-hashes", "--no-header", "--no-annotate"]
    command += ["--index-url", PACKAGE_INDEX, "-"]
    done = subprocess.run(command, input="\n".join(wanted), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"lock.py: {done.stderr}")
    return done.stdout


def entries(text: str) -> list[str]:
    """The entries of a lock file: a line with name, version and perhaps a marker, and the lines of its hashes.

    A package has several entries if its versions differ between platforms or versions of Python.
    """
    return [match[0] for match in _ENTRY.finditer(text)]


def version_of(entry: str) -> str:
    """The version of an entry."""
    match = _ENTRY.match(entry)
    assert match is not None, "an entry begins with a name and its version"
    return match[2]


def with_hashes(entry: str, hashes: Iterable[str]) -> str:
    """The entry with further hashes that it may have."""
    new = sorted(set(hashes) - set(_HASH.findall(entry)))
    return entry + "".join(f" \\\n    --hash={one}" for one in new)


def write(name: str, locked: Iterable[str]) -> None:
    """Writes a lock file."""
    (FOLDER / f"{name}.txt").write_text("# Written by `make lock`.\n" + "".join(f"{entry}\n" for entry in locked))
    print(f"deploy/lock/{name}.txt")


def torch_hashes(entry: str, indexes: Sequence[str], unreached: list[str]) -> list[str]:
    """Hashes of torch's builds for Linux in indexes of PyTorch's, and those that the lock file has of this version: an
    index may not answer today.
    """
    version, python = version_of(entry), f"cp{PYTHON.replace('.', '')}"
    path = FOLDER / "torch.txt"
    known = entries(path.read_text()) if path.exists() else []
    hashes = [one for old in known if version_of(old) == version for one in _HASH.findall(old)]
    wheel = re.compile(
        rf"torch-{re.escape(version)}(?:%2B|\+)\w+-{python}-{python}-manylinux[^#\"]*#sha256=([0-9a-f]{{64}})"
    )
    for index in indexes:
        try:
            with urllib.request.urlopen(f"{index}/torch/", timeout=_TIMEOUT_S) as answer:
                hashes += [f"sha256:{found}" for found in wheel.findall(answer.read().decode())]
        except OSError as error:
            unreached.append(f"hashes of torch from {index}: {error}")
    return hashes


def pin_base_image(unreached: list[str]) -> None:
    """Writes the digest that the tag has now wherever the base image is named."""
    repository, tag = BASE_IMAGE
    scope = f"service=registry.docker.io&scope=repository:{repository}:pull"
    try:
        with urllib.request.urlopen(f"https://auth.docker.io/token?{scope}", timeout=_TIMEOUT_S) as answer:
            token = json.load(answer)["token"]
        request = urllib.request.Request(
            f"https://registry-1.docker.io/v2/{repository}/manifests/{tag}",
            headers={"Authorization": f"Bearer {token}", "Accept": _MANIFESTS},
            method="HEAD",
        )
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            digest = answer.headers["Docker-Content-Digest"]
    except OSError as error:
        unreached.append(f"digest of {repository}:{tag}: {error}")
        return
    for path in (ROOT / "deploy" / "Dockerfile", ROOT / "compose.yaml"):
        text = path.read_text()
        path.write_text(re.sub(rf"python:{re.escape(tag)}@sha256:[0-9a-f]{{64}}", f"python:{tag}@{digest}", text))
    print(f"python:{tag}@{digest}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
