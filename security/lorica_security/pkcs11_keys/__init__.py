"""Private keys that lie in a PKCS#11 token (an HSM, a smart card): named by a URI, used there, never read."""
