"""The long-lived Ed25519 identity of a silo or coordinator: what it endorses, seals and hands on."""
