"""`python -m engine.bench.gpu.versions`: prints the GPU, versions, and what servers lack, in one line."""

import argparse
import sys
from collections.abc import Sequence

from engine.bench.gpu.wheels import missing_serving_packages
from kernels.bench.device import describe_device, open_device


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    device = open_device(parser.parse_args(argv).device)
    about = describe_device(device.device)
    versions = ", ".join(f"{name} {version or 'missing'}" for name, version in about.pop("versions").items())
    missing = ", ".join(missing_serving_packages())
    print(f"{about}, kernels for {device.target.name}, {versions}; missing for servers: {missing or 'nothing'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
