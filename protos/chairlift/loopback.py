"""Addresses of this machine's loopback, which need neither TLS nor a proxy."""

import ipaddress


def is_loopback(host: str) -> bool:
    """Returns whether only this machine can reach the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
