// Answers in a form through the Vercel AI SDK, with zod's records. Arguments and output are those of structured.py.
import { createAnthropic } from '@ai-sdk/anthropic';
import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { generateText, Output, streamText, tool } from 'ai';
import { z } from 'zod';

const [url, model] = process.argv.slice(2);
const openai = createOpenAI({ baseURL: `${url}/v1`, apiKey: 'none' });
const compatible = createOpenAICompatible({ name: 'lopa', baseURL: `${url}/v1`, supportsStructuredOutputs: true });
const anthropic = createAnthropic({ baseURL: `${url}/v1`, apiKey: 'none' });
const models = {
  chat: openai.chat(model),
  compatible: compatible(model),
  responses: openai.responses(model),
  messages: anthropic(model),
};
const prompt = 'Tom has 12 apples and buys 30 more. How many apples does he have?';

const unit = z.enum(['apples', 'boxes']);
const schemas = {
  object: z.object({ number: z.number().int().min(0).max(999), unit }),
  'a record of known names': z.object({ content: z.record(unit, z.boolean()) }),
  'a record of any names': z.object({ content: z.record(z.string(), z.boolean()) }),
  'a union': z.object({
    content: z.discriminatedUnion('kind', [z.object({ kind: z.literal('a') }), z.object({ kind: z.literal('b'), unit })]),
  }),
};

// Each returns the value; one that the model does not end within its tokens counts as taken.
const calls = {
  async schema(options, schema) {
    return (await generateText({ ...options, output: Output.object({ schema }) })).output;
  },
  async 'schema, streamed'(options, schema) {
    const result = streamText({ ...options, output: Output.object({ schema }) });
    for await (const _ of result.partialOutputStream);
    return await result.output;
  },
  async tool(options, schema) {
    const tools = { measure: tool({ description: 'Measures.', inputSchema: schema }) };
    const result = await generateText({ ...options, tools, toolChoice: 'required', stopSequences: ['Observation:'] });
    if (result.finishReason === 'length') return 'length';
    return result.toolCalls[0].input;
  },
};

const found = {};
for (const [route, model] of Object.entries(models)) {
  for (const [form, call] of Object.entries(calls)) {
    for (const [name, schema] of Object.entries(schemas)) {
      const result = (found[`${route}, ${form}, ${name}`] = { found: null, error: null });
      let failure = null;
      // A stream does not throw: it tells its error to onError.
      const maxOutputTokens = name.startsWith('a record') ? 64 : 200;
      const options = { model, prompt, maxRetries: 0, maxOutputTokens, onError: ({ error }) => (failure ??= error) };
      if (form === 'tool') delete options.onError;
      try {
        const value = await call(options, schema);
        if (failure) throw failure;
        if (value !== 'length') schema.parse(value);
        result.found = JSON.stringify(value);
      } catch (error) {
        const cause = failure ?? error;
        if (cause.finishReason === 'length') result.found = 'length';
        else result.error = `${cause} ${cause.responseBody ?? cause.text ?? ''}`;
      }
    }
  }
}
console.log(JSON.stringify(found));
