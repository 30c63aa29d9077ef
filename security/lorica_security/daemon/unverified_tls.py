"""TLS of whoever answers, to look at the certificate before anything is said."""

import ssl


def unverified_tls() -> ssl.SSLContext:
    """TLS 1.3 as gRPC speaks it, verifying nothing: that is the caller's, who sends nothing over it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    return context
