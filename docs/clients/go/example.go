// Calls Chairlift from Go: a stream, a cancellation, a deadline, the details of an error.
//
//	sh generate.sh && go run . [HOST:PORT]
//
// CHAIRLIFT_API_KEY is the server's API key, if it wants one; CHAIRLIFT_TLS_CA the file with its certificate authority,
// if it speaks TLS.
package main

import (
	"context"
	"fmt"
	"io"
	"log"
	"os"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	pb "chairlift.example/chairliftpb"
)

func prompt(text string) *pb.GenerationSpec_Text {
	return &pb.GenerationSpec_Text{Text: text}
}

func endless() *pb.GenerationSpec {
	stop := &pb.StopOptions{MaxTokens: proto.Uint32(900), IgnoreEndToken: true}
	return &pb.GenerationSpec{Prompt: prompt("Once upon a time"), Stop: stop}
}

func stream(client pb.GenerationServiceClient) error {
	ctx, done := context.WithTimeout(context.Background(), time.Minute)
	defer done()
	call, err := client.StreamGenerate(ctx, &pb.StreamGenerateRequest{Spec: &pb.GenerationSpec{
		Prompt:   prompt("Once upon a time"),
		Sampling: &pb.SamplingOptions{Temperature: proto.Float32(0.8), Seed: proto.Uint64(7)},
		Stop:     &pb.StopOptions{MaxTokens: proto.Uint32(32)},
	}})
	if err != nil {
		return err
	}
	text := ""
	for {
		message, err := call.Recv()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		if chunk := message.GetChunk(); chunk != nil {
			text += chunk.Text // one token or more, whatever was ready
		} else if finished := message.GetFinished(); finished != nil {
			fmt.Printf("stream: %v after %d tokens: %q\n", finished.Reason, finished.Usage.NumOutputTokens, text)
		}
	}
}

func cancel(client pb.GenerationServiceClient) error {
	ctx, cancelCall := context.WithCancel(context.Background())
	defer cancelCall()
	call, err := client.StreamGenerate(ctx, &pb.StreamGenerateRequest{Spec: endless()})
	if err != nil {
		return err
	}
	numChunks := 0
	for {
		message, err := call.Recv()
		if err != nil {
			fmt.Printf("cancel: %v after %d chunks\n", status.Code(err), numChunks)
			return nil
		}
		if message.GetChunk() != nil && numChunks < 3 {
			if numChunks++; numChunks == 3 {
				cancelCall() // the engine frees the request's memory within two steps
			}
		}
	}
}

func deadline(client pb.GenerationServiceClient) error {
	ctx, done := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer done()
	_, err := client.Generate(ctx, &pb.GenerateRequest{Spec: endless()})
	fmt.Printf("deadline: %v\n", status.Code(err))
	return nil
}

func errorDetails(client pb.GenerationServiceClient) error {
	_, err := client.Generate(context.Background(), &pb.GenerateRequest{Spec: &pb.GenerationSpec{
		Prompt:   prompt("Once upon a time"),
		Sampling: &pb.SamplingOptions{Temperature: proto.Float32(-1)},
	}})
	failure := status.Convert(err)
	fmt.Printf("error: %v: %s\n", failure.Code(), failure.Message())
	for _, detail := range failure.Details() {
		switch detail := detail.(type) {
		case *errdetails.ErrorInfo:
			fmt.Printf("  ErrorInfo: %s of %s\n", detail.Reason, detail.Domain)
		case *errdetails.BadRequest:
			for _, violation := range detail.FieldViolations {
				fmt.Printf("  BadRequest: %s: %s\n", violation.Field, violation.Description)
			}
		case *errdetails.RetryInfo:
			fmt.Printf("  RetryInfo: %v\n", detail.RetryDelay)
		}
	}
	return nil
}

// apiKey goes into the metadata of every call.
type apiKey string

func (key apiKey) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	return map[string]string{"authorization": "Bearer " + string(key)}, nil
}

func (key apiKey) RequireTransportSecurity() bool {
	return false // on this machine; beyond it, use TLS
}

// connect speaks plainly, or TLS with the authority that the environment names; with the key of the environment.
func connect(target string) (*grpc.ClientConn, error) {
	// What every release of gRPC 1.x takes. From 1.63 on: grpc.NewClient and credentials/insecure.
	options := []grpc.DialOption{grpc.WithInsecure()}
	if ca := os.Getenv("CHAIRLIFT_TLS_CA"); ca != "" {
		tls, err := credentials.NewClientTLSFromFile(ca, "")
		if err != nil {
			return nil, err
		}
		options[0] = grpc.WithTransportCredentials(tls)
	}
	if key := os.Getenv("CHAIRLIFT_API_KEY"); key != "" {
		options = append(options, grpc.WithPerRPCCredentials(apiKey(key)))
	}
	return grpc.Dial(target, options...)
}

func main() {
	target := "127.0.0.1:50051"
	if len(os.Args) > 1 {
		target = os.Args[1]
	}
	connection, err := connect(target)
	if err != nil {
		log.Fatal(err)
	}
	defer connection.Close()
	client := pb.NewGenerationServiceClient(connection)
	for _, example := range []func(pb.GenerationServiceClient) error{stream, cancel, deadline, errorDetails} {
		if err := example(client); err != nil {
			log.Fatal(err)
		}
	}
}
