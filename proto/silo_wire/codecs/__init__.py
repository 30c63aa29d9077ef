"""Protobuf messages to and from frozen values; every fault is MalformedMessage."""
