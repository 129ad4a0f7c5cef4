"""Domain values to protobuf and back: the only package that knows the wire."""
