"""Code made from the .proto files by `make proto`."""
