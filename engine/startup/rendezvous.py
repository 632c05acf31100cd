"""Brings the machines that share a model together: they agree on what they serve, and on where their ranks meet."""

import fcntl
import json
import platform
import socket
import struct

from engine import __version__
from engine.model.fingerprint import weights_fingerprint
from engine.parallel.nodes import NodeLink, NodeListener, free_port, join_nodes
from engine.parallel.process_group import StorePlace
from engine.startup.progress import StartupProgress
from engine.startup.rank_task import RankTask
from kernels.dtypes import dtype_name

JOIN_TIMEOUT_S = 3600.0
"""How long machines wait for each other: one may still be downloading the model."""

_SHARED_FLAGS = (
    "load_format", "model_impl", "max_model_len", "seed", "quantization", "batch_invariant", "block_size", "kernels",
    "attention_backend", "enforce_eager", "tensor_parallel_size", "pipeline_parallel_size", "all_reduce",
)  # fmt: skip
"""What ranks on several machines must have been told alike; limits and dtypes are compared as they came out."""

_SIOCGIFADDR = 0x8915  # of Linux: the IPv4 address of an interface


def facts_of(task: RankTask) -> dict[str, str]:
    """Returns what all machines must have in common: name -> value."""
    config = task.config
    flags = {f"--{name.replace('_', '-')}": str(getattr(config, name)) for name in _SHARED_FLAGS}
    weights = "random" if config.load_format == "dummy" else weights_fingerprint(task.model_dir)
    return flags | {
        "the version of chairlift": __version__,
        "the version of Python": platform.python_version(),  # plans are in its format
        "the model": repr(task.model) if config.load_format == "dummy" else weights,
        "--dtype": dtype_name(task.dtype),
        "--kv-cache-dtype": dtype_name(task.kv_dtype),
        "--max-num-seqs": str(task.limits.max_num_seqs),
        "--max-num-batched-tokens": str(task.limits.max_num_batched_tokens),
        "the device": "CPU" if task.kv_plan is not None else "GPU",
        "the size of the KV cache": "measured" if task.measures_memory else "given",  # all ranks measure together
    }


def gather_nodes(task: RankTask, startup: StartupProgress) -> tuple[list[NodeLink], StorePlace]:
    """Waits for the other machines, on that of rank 0.

    Returns: their connections, node 1 first, and where all ranks meet.
    Raises: ConfigError: one does not come in time, or the address cannot be listened on.
    """
    config = task.config
    assert config.master_addr is not None
    listener = NodeListener(config.master_addr, config.nnodes, facts_of(task))
    port = 0

    def first_message() -> bytes:
        nonlocal port
        port = free_port(listener.host)  # as late as possible: it is not held
        return json.dumps({"port": port}).encode()

    startup.begin("nodes", f"waiting for the other nodes at {config.master_addr}")
    links = listener.accept_all(first_message, JOIN_TIMEOUT_S, startup.update)
    return links, StorePlace(listener.host, port, interface_of(listener.host))


def join_group(task: RankTask, startup: StartupProgress) -> tuple[NodeLink, StorePlace]:
    """Joins the machine of rank 0, on another one.

    Returns: the connection, and where all ranks meet.
    Raises: ConfigError: it is not reached in time, or was started with other flags, another model or version.
    """
    config = task.config
    assert config.master_addr is not None
    startup.begin("nodes", f"connecting to node 0 at {config.master_addr}")
    link, message = join_nodes(
        config.master_addr, config.node_rank, config.nnodes, facts_of(task), JOIN_TIMEOUT_S, startup.update
    )
    port = int(json.loads(message)["port"])
    return link, StorePlace(link.peer_host, port, interface_of(link.local_host))


def interface_of(host: str) -> str | None:
    """Returns the network interface that has an IPv4 address; None: none has, or it cannot be found out."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)
            except OSError:  # it has no IPv4 address, or the system is not Linux
                continue
            if socket.inet_ntoa(answer[20:24]) == host:
                return name
    return None
