"""Notifies the service manager that the engine serves, by systemd's protocol (sd_notify(3)).

`chairlift up` and systemd (Type=notify) listen for it. Nothing is sent without NOTIFY_SOCKET.
"""

import logging
import os
import socket
from collections.abc import Mapping

_log = logging.getLogger(__name__)


def notify_ready(instance_id: str, environ: Mapping[str, str] = os.environ) -> None:
    """Sends READY=1 and the instance id that frontends get in Welcome; logs a warning if that fails."""
    address = environ.get("NOTIFY_SOCKET")
    if not address:
        return
    message = f"READY=1\nX_INSTANCE_ID={instance_id}"
    if address.startswith("@"):  # an abstract socket
        address = f"\0{address[1:]}"
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notification:
            notification.sendto(message.encode(), address)
    except OSError as error:
        _log.warning("Cannot notify the service manager at %s: %s", environ["NOTIFY_SOCKET"], error.strerror)
