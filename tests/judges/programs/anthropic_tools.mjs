// Calls of tools through Anthropic's client for JavaScript. Arguments and output are those of structured.py.
import Anthropic, { BadRequestError } from '@anthropic-ai/sdk';
import { betaZodTool } from '@anthropic-ai/sdk/helpers/beta/zod';
import { zodOutputFormat } from '@anthropic-ai/sdk/helpers/zod';
import { z } from 'zod';

const [url, model, hasTools] = process.argv.slice(2);
const client = new Anthropic({ baseURL: url, authToken: 'none', apiKey: null, maxRetries: 0 });
// Without limits of numbers, which the client keeps to itself, and the bundled model would exceed.
const amount = z.object({ unit: z.enum(['apples', 'boxes']), isFresh: z.boolean() });
const tools = [{ name: 'measure', description: 'Measures.', input_schema: z.toJSONSchema(amount) }];
const question = { role: 'user', content: 'Tom has 12 apples and buys 30 more. How many apples does he have?' };
const asked = { model, max_tokens: 200, messages: [question], tools };
const any = { type: 'any', disable_parallel_tool_use: true };

const cases = {
  async parse() {
    const output_config = { format: zodOutputFormat(amount) };
    return (await client.messages.parse({ ...asked, tools: [], output_config })).parsed_output;
  },
  async 'a forced call'() {
    const message = await client.messages.create({ ...asked, tool_choice: any });
    if (message.stop_reason !== 'tool_use') throw new Error(message.stop_reason);
    return message.content[0].input;
  },
  async errors() {
    try {
      await client.messages.create({ ...asked, tools: [{ type: 'web_search_20250305', name: 'web_search' }] });
    } catch (error) {
      if (!(error instanceof BadRequestError) || error.error.error.type !== 'invalid_request_error') throw error;
      return await cases['a forced call']();
    }
    throw new Error('a tool that this server does not have');
  },
};
if (hasTools) {
  // A call, an answer to its result, and a question after that, all streamed.
  cases['an agent, streamed'] = async () => {
    const messages = [question];
    const ask = async (options) => {
      const { content } = await client.messages.stream({ ...asked, messages, ...options }).finalMessage();
      messages.push({ role: 'assistant', content });
      return content;
    };
    const [used] = await ask({ tool_choice: any });
    messages.push({ role: 'user', content: [{ type: 'tool_result', tool_use_id: used.id, content: '42' }] });
    await ask({});
    messages.push({ role: 'user', content: 'Are you sure?' });
    const [said] = await ask({ tool_choice: { type: 'none' } });
    if (said.type !== 'text') throw new Error(said.type);
    return used.input;
  };
  cases['toolRunner'] = async () => {
    let input;
    const run = (value) => ((input = value), '42');
    const measure = betaZodTool({ name: 'measure', description: 'Measures.', inputSchema: amount, run });
    await client.beta.messages.toolRunner({ ...asked, tools: [measure], tool_choice: any, max_iterations: 2 });
    return input;
  };
}

const found = {};
for (const [name, call] of Object.entries(cases)) {
  try {
    found[name] = { found: JSON.stringify(amount.parse(await call())), error: null };
  } catch (error) {
    found[name] = { found: null, error: String(error) };
  }
}
console.log(JSON.stringify(found));
