"""The gRPC server. `inference.proto` is the interface; `*_pb2*` is made from it, by protoc."""
