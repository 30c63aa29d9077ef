"""The gRPC server: listeners, the gate that every call passes, and one servicer for each service."""
