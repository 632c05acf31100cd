#!/bin/sh
# Makes chairliftpb/ from the public proto. Needs protoc, protoc-gen-go and protoc-gen-go-grpc.
set -eu
cd "$(dirname "$0")"
proto=chairlift/v1/generation_service.proto
package="M$proto=chairlift.example/chairliftpb"
protoc -I ../../../protos \
  --go_out=. --go_opt="$package" --go_opt=module=chairlift.example \
  --go-grpc_out=. --go-grpc_opt="$package" --go-grpc_opt=module=chairlift.example \
  "$proto"
