// OpenAI's own client for Node.js against a server whose model answers with its prompt. Usage: node client.js BASE_URL

import assert from 'node:assert/strict';
import OpenAI from 'openai';

const client = new OpenAI({ baseURL: process.argv[2], apiKey: 'none', maxRetries: 0, timeout: 20_000 });
const messages = [{ role: 'user', content: 'grüß ☃' }];
const rendered = '<user>grüß ☃<assistant>';

const models = await client.models.list();
assert.deepEqual(models.data.map((model) => model.id), ['fake']);

const completion = await client.completions.create({ model: 'fake', prompt: ['abc', 'd'], n: 2 });
assert.deepEqual(completion.choices.map((choice) => choice.text), ['abc', 'abc', 'd', 'd']);

const chat = await client.chat.completions.create({ model: 'fake', messages, logprobs: true, top_logprobs: 1 });
assert.equal(chat.choices[0].message.content, rendered);
assert.equal(chat.choices[0].logprobs.content[0].token, '<');

let text = '';
let usage;
const stream = await client.chat.completions.create({
  model: 'fake',
  messages,
  stream: true,
  stream_options: { include_usage: true },
});
for await (const event of stream) {
  text += event.choices[0]?.delta.content ?? '';
  usage = event.usage ?? usage;
}
assert.equal(text, rendered);
assert.equal(usage.completion_tokens, Buffer.byteLength(rendered) + 1);

const call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rom"}}\n</tool_call>';
const tools = [{ type: 'function', function: { name: 'weather', parameters: { type: 'object' } } }];
const final = await client.chat.completions
  .stream({ model: 'fake', messages: [{ role: 'user', content: call }], tools })
  .finalChatCompletion();
assert.equal(final.choices[0].finish_reason, 'tool_calls');
assert.deepEqual(JSON.parse(final.choices[0].message.tool_calls[0].function.arguments), { city: 'Rom' });

const response = await client.responses.create({ model: 'fake', input: messages, store: false });
assert.equal(response.output_text, rendered);
const streamed = client.responses.stream({ model: 'fake', input: call, tools: [{ ...tools[0].function, ...tools[0] }] });
const deltas = [];
streamed.on('response.function_call_arguments.delta', (event) => deltas.push(event.delta));
const item = (await streamed.finalResponse()).output.find((each) => each.type === 'function_call');
assert.deepEqual([item.name, item.arguments], ['weather', deltas.join('')]);

await assert.rejects(
  client.completions.create({ model: 'fake', prompt: 'x'.repeat(5000) }),
  (error) =>
    error instanceof OpenAI.BadRequestError &&
    error.code === 'context_length_exceeded' &&
    error.message.includes("This model's maximum context length is 4096 tokens"),
);
await assert.rejects(client.models.retrieve('org/other'), OpenAI.NotFoundError);

const endless = await client.completions.create({
  model: 'fake',
  prompt: 'abc',
  max_tokens: 4000,
  ignore_eos: true,
  stream: true,
});
for await (const event of endless) {
  assert.ok(event.choices);
  break; // closes the connection
}
console.log('all is well');
