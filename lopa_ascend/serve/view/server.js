// The server's routes, and trace files. What goes wrong becomes a Problem: a sentence that says what to do.

export class Problem extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

const KEY = "lopa-key"; // in sessionStorage, which ends with the tab

export function useKey(key) {
  // What no header can hold would look like a server that does not answer.
  if (!/^[\x21-\x7e]+$/.test(key)) throw new Problem("A key has no spaces, and only letters, digits and signs of ASCII.", 401);
  sessionStorage.setItem(KEY, key);
}

async function call(path, body, signal) {
  const key = sessionStorage.getItem(KEY), headers = {};
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body) headers["Content-Type"] = "application/json";
  let answer;
  try {
    answer = await fetch(path, { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal });
  } catch {
    if (signal?.aborted) throw new Problem("Stopped before the answer began.");
    throw new Problem("The server cannot be reached: see whether it runs, then try again.");
  }
  if (answer.ok) return answer;
  const { error } = await answer.json().catch(() => ({}));
  if (answer.status === 401) {
    throw new Problem(key ? "The server refuses this key: type another one." : "This server needs a key: type it here.", 401);
  }
  throw new Problem(sentence(error, `The server answers with status ${answer.status}.`), answer.status);
}

function sentence(error, otherwise) {
  if (!error?.message) return otherwise;
  return `${error.message.replace(/\.$/, "")}${error.code === "queue_full" ? "; try again in a moment" : ""}.`;
}

export const load = async (path) => (await call(path)).json();

export const abort = async (id) => call("abort_request", { request_id: id });

// The events of a diffusion stream as they come.
export async function* events(path, body, signal) {
  const reader = (await call(path, body, signal)).body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    let part;
    try {
      part = await reader.read();
    } catch {
      if (signal?.aborted) throw new Problem("Stopped: what is shown is not the whole answer.");
      return; // the run tells what is missing
    }
    if (part.done) return;
    const lines = (rest + part.value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: {")) continue;
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new Problem(sentence(event.error, "The request failed on the server."));
      yield event;
    }
  }
}

// The events in the text of a trace file, or of a diffusion stream that was saved as it came.
export function parse(text, name) {
  const lines = text.split("\n").map((line) => line.replace(/^data: /, "").trim());
  const events = [];
  for (const [index, line] of lines.entries()) {
    if (!line || line === "[DONE]" || line.startsWith(":")) continue;
    try {
      events.push(Object(JSON.parse(line)));
    } catch {
      const where = events.length ? `breaks off or is damaged in line ${index + 1}` : "is no trace: it does not hold JSON lines";
      throw new Problem(`${name} ${where}. Make one with "trace": true in a request, or with LLM.save_trace.`);
    }
  }
  return events;
}
