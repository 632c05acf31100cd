// Calls Chairlift from Node.js: a stream, a cancellation, a deadline, the details of an error.
//
//   npm install && node example.js [HOST:PORT]
//
// CHAIRLIFT_API_KEY is the server's API key, if it wants one; CHAIRLIFT_TLS_CA the file with its certificate authority, if it
// speaks TLS.
'use strict';

const fs = require('node:fs');
const path = require('node:path');
const grpc = require('@grpc/grpc-js');
const protoLoader = require('@grpc/proto-loader');
const protobuf = require('protobufjs');

const PROTOS = path.join(__dirname, '..', '..', '..', 'protos');
const definition = protoLoader.loadSync('chairlift/v1/generation_service.proto', {
  includeDirs: [PROTOS],
  keepCase: true, // names as in the proto
  enums: String, // FINISH_REASON_END_TOKEN, not 1
  longs: String, // a seed has 64 bits, a number of JavaScript 53
  defaults: true, // an empty text is '', not undefined
  oneofs: true, // message.event says which of started, chunk and finished is there
});
const { GenerationService } = grpc.loadPackageDefinition(definition).chairlift.v1;
const rpc = new protobuf.Root().loadSync(path.join(__dirname, 'error_details.proto'), { keepCase: true });

const ENDLESS = { text: 'Once upon a time', stop: { max_tokens: 900, ignore_end_token: true } };

async function stream(client) {
  const spec = { text: 'Once upon a time', sampling: { temperature: 0.8, seed: 7 }, stop: { max_tokens: 32 } };
  const call = client.StreamGenerate({ spec }, { deadline: Date.now() + 60_000 });
  let text = '';
  for await (const message of call) {
    if (message.event === 'chunk') {
      text += message.chunk.text; // one token or more, whatever was ready
    } else if (message.event === 'finished') {
      const { reason, usage } = message.finished;
      console.log(`stream: ${reason} after ${usage.num_output_tokens} tokens: ${JSON.stringify(text)}`);
    }
  }
}

async function cancel(client) {
  const call = client.StreamGenerate({ spec: ENDLESS });
  let numChunks = 0;
  try {
    for await (const message of call) {
      if (message.event === 'chunk' && ++numChunks === 3) {
        call.cancel(); // the engine frees the request's memory within two steps
      }
    }
  } catch (error) {
    console.log(`cancel: ${grpc.status[error.code]} after ${numChunks} chunks`);
  }
}

async function deadline(client) {
  try {
    await generate(client, ENDLESS, { deadline: Date.now() + 50 });
  } catch (error) {
    console.log(`deadline: ${grpc.status[error.code]}`);
  }
}

async function errorDetails(client) {
  try {
    await generate(client, { text: 'Once upon a time', sampling: { temperature: -1 } });
  } catch (error) {
    console.log(`error: ${grpc.status[error.code]}: ${error.details}`);
    const [packed] = error.metadata.get('grpc-status-details-bin');
    for (const { type_url, value } of rpc.lookupType('google.rpc.Status').decode(packed).details) {
      const type = rpc.lookupType(type_url.split('/').pop());
      console.log(`  ${type.name}: ${JSON.stringify(type.decode(value))}`);
    }
  }
}

/** The unary call as a promise. */
function generate(client, spec, options = {}) {
  return new Promise((resolve, reject) => {
    client.Generate({ spec }, options, (error, response) => (error ? reject(error) : resolve(response)));
  });
}

/** Plain, or TLS with the authority that the environment names; with the key of the environment, if it has one. */
function connect(target) {
  const { CHAIRLIFT_TLS_CA: ca, CHAIRLIFT_API_KEY: key } = process.env;
  const credentials = ca ? grpc.credentials.createSsl(fs.readFileSync(ca)) : grpc.credentials.createInsecure();
  const withKey = (options, nextCall) =>
    new grpc.InterceptingCall(nextCall(options), {
      start: (metadata, listener, next) => {
        metadata.set('authorization', `Bearer ${key}`);
        next(metadata, listener);
      },
    });
  return new GenerationService(target, credentials, { interceptors: key ? [withKey] : [] });
}

async function main(target) {
  const client = connect(target);
  for (const example of [stream, cancel, deadline, errorDetails]) {
    await example(client);
  }
  client.close();
}

main(process.argv[2] ?? '127.0.0.1:50051').catch((error) => {
  console.error(error);
  process.exitCode = 1;
});
