"""Lets a TLS context ask for a client's certificate without verifying it: RequestClientCert, RequireAnyClientCert.

Python's ssl ties asking to verifying; OpenSSL does not. This reaches for OpenSSL's own function, and only where the web
config asks for one of these two.
"""

from __future__ import annotations

import ctypes
import ssl
import sys

_VERIFY_PEER, _FAIL_IF_NONE = 1, 2
_NEWEST_CHECKED = (3, 13)
_Callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p)


def _take_it(_verified: int, _chain: int | None) -> int:
    return 1


_TAKE_IT = _Callback(_take_it)
"""At module level: OpenSSL keeps the pointer as long as the context lives."""


def take_any_certificate(context: ssl.SSLContext, required: bool) -> bool:
    """The client still has to own the certificate's key; who signed it, and until when it holds, is not looked at.

    False where this Python has OpenSSL built in with its functions hidden, or is one whose layout nobody has checked.
    """
    if sys.implementation.name != "cpython" or not (3, 11) <= sys.version_info[:2] <= _NEWEST_CHECKED:
        return False
    try:
        set_verify = ctypes.CDLL(sys.modules["_ssl"].__file__).SSL_CTX_set_verify
    except (AttributeError, OSError):
        return False
    set_verify.argtypes = (ctypes.c_void_p, ctypes.c_int, _Callback)
    set_verify.restype = None
    # CPython's context object is its header and then the pointer to OpenSSL's, from 3.2 to this day.
    address = ctypes.c_void_p.from_address(id(context) + object.__basicsize__)
    set_verify(address, _VERIFY_PEER | (_FAIL_IF_NONE if required else 0), _TAKE_IT)
    return True
