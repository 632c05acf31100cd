"""HTTP without the proxies that the environment names, as targets are asked without: one would see keys, and answers of
this machine would be its own.
"""

import ssl
import urllib.request


def direct_opener(context: ssl.SSLContext | None = None) -> urllib.request.OpenerDirector:
    """Returns what opens URLs.

    Args:
        context: for https; None: the certificates that Python trusts.
    """
    return urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
