// Conversations through the Vercel AI SDK: chat completions, responses and messages. Arguments and output are those of
// conversation.py.
import { createAnthropic } from '@ai-sdk/anthropic';
import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { convertToModelMessages, generateText, readUIMessageStream, streamText, toUIMessageStream } from 'ai';

const [url, model, questions] = process.argv.slice(2);
const openai = createOpenAI({ baseURL: `${url}/v1`, apiKey: 'none' });
const compatible = createOpenAICompatible({ name: 'lopa', baseURL: `${url}/v1`, includeUsage: true });
const anthropic = createAnthropic({ baseURL: `${url}/v1`, apiKey: 'none' });

// By case: the model, and the SDK's options for it.
const models = {
  chat: [openai.chat(model)],
  compatible: [compatible(model)],
  responses: [openai.responses(model), { openai: { store: false } }],
  messages: [anthropic(model)],
  'responses, stored': [openai.responses(model)], // the SDK's default: earlier answers by their ids alone
};

// Each asks the last question of the history, adds the answer to the history, and returns the answer.
const calls = {
  async generate(history, options) {
    const result = await generateText({ ...options, messages: history });
    history.push(...result.responseMessages);
    return result.text;
  },
  async saved(history, options) {
    const result = await generateText({ ...options, messages: history });
    history.push(...JSON.parse(JSON.stringify(result.responseMessages)));
    return result.text;
  },
  async stream(history, options) {
    const result = streamText({ ...options, messages: history });
    let text = '';
    for await (const piece of result.textStream) text += piece;
    history.push(...(await result.responseMessages));
    return text;
  },
  async 'messages of a page'(history, options) {
    const result = streamText({ ...options, messages: history });
    let message;
    for await (message of readUIMessageStream({ stream: toUIMessageStream({ stream: result.stream }) }));
    history.push(...(await convertToModelMessages([message])));
    return message.parts.map((part) => part.text ?? '').join('');
  },
};

const found = {};
for (const [name, [model, providerOptions]] of Object.entries(models)) {
  for (const [form, call] of Object.entries(calls)) {
    const history = [];
    const answers = [];
    let failure = null;
    // A stream does not throw: it tells its error to onError.
    const options = { model, providerOptions, maxRetries: 0, onError: ({ error }) => (failure = error) };
    try {
      for (const question of JSON.parse(questions)) {
        history.push({ role: 'user', content: question });
        const answer = await call(history, options);
        if (failure) break;
        answers.push(answer);
      }
    } catch (error) {
      failure ??= error;
    }
    found[`${name}, ${form}`] = { answers, error: failure && String(failure) };
  }
}
console.log(JSON.stringify(found));
