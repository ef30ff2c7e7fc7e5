# A Python that has gRPC, for the second agent. Sourced by run.sh.
more_packages=(libgrpc++-dev libprotobuf-dev protobuf-compiler protobuf-compiler-grpc libssl-dev openssl python3-grpcio python3-protobuf python3-xxhash)

start() {
  local python
  for python in python3 /usr/bin/python3; do
    "$python" -c 'import grpc, google.protobuf' 2>/dev/null && { flags=(--python "$python" "${flags[@]}"); return; }
  done
  die "no python3 can import grpc and google.protobuf"
}
