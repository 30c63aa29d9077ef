"""What is generated from the .proto files beside it, by `make proto`."""
