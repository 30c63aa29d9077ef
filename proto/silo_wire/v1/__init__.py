"""The messages and calls of the wire, generated from the .proto files beside it by `make proto`."""
