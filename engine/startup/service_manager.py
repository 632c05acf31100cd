"""Tells whoever has started this process that it serves, by systemd's notification protocol (sd_notify(3)).

`chairlift up` listens for that, and so does systemd for a unit of Type=notify. Without NOTIFY_SOCKET nothing is sent.
"""

import logging
import os
import socket
from collections.abc import Mapping

_log = logging.getLogger(__name__)


def notify_ready(instance_id: str, environ: Mapping[str, str] = os.environ) -> None:
    """Sends READY=1 and the instance id that frontends get in Welcome.

    A manager that cannot be reached is logged: the engine can serve without it.
    """
    address = environ.get("NOTIFY_SOCKET")
    if not address:
        return
    message = f"READY=1\nX_INSTANCE_ID={instance_id}"
    if address.startswith("@"):  # an abstract socket
        address = f"\0{address[1:]}"
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as notices:
            notices.sendto(message.encode(), address)
    except OSError as error:
        _log.warning("cannot notify %s: %s", environ["NOTIFY_SOCKET"], error.strerror)
