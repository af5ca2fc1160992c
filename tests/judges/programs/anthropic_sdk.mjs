// Conversations through Anthropic's client for JavaScript. Arguments and output are those of conversation.py.
import Anthropic from '@anthropic-ai/sdk';

const [url, model, questions] = process.argv.slice(2);
const client = new Anthropic({ baseURL: url, apiKey: 'none', maxRetries: 0 });
const asked = { model, max_tokens: 256 };
const betas = ['interleaved-thinking-2025-05-14', 'context-management-2025-06-27'];

// Each asks the last question of the history and returns the message.
const calls = {
  create: (messages) => client.messages.create({ ...asked, messages }),
  stream: (messages) => client.messages.stream({ ...asked, messages }).finalMessage(),
  beta: (messages) => client.beta.messages.create({ ...asked, messages, betas, thinking: { type: 'adaptive' } }),
  'beta stream': (messages) => client.beta.messages.stream({ ...asked, messages, betas }).finalMessage(),
  async events(messages) {
    let text = '';
    for await (const event of await client.messages.create({ ...asked, messages, stream: true })) {
      if (event.type === 'content_block_delta') text += event.delta.text;
    }
    return { content: [{ type: 'text', text, cache_control: { type: 'ephemeral' } }] };
  },
};
const forms = { content: (message) => message.content, saved: (message) => JSON.parse(JSON.stringify(message.content)) };

const found = {};
for (const [name, call] of Object.entries(calls)) {
  for (const [form, convert] of Object.entries(forms)) {
    const history = [];
    const answers = [];
    let failure = null;
    try {
      for (const question of JSON.parse(questions)) {
        history.push({ role: 'user', content: question });
        const message = await call(history);
        history.push({ role: 'assistant', content: convert(message) });
        answers.push(message.content[0].text);
      }
    } catch (error) {
      failure = String(error);
    }
    found[`${name}, ${form}`] = { answers, error: failure };
  }
}
console.log(JSON.stringify(found));
