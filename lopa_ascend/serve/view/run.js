// One answer, pass by pass. State i is that after i passes; state 0 has the empty canvas.

import { Problem } from "./server.js";

const FORMAT = "lopa-trace", VERSION = 1;
const MOST = 1 << 14; // positions that a canvas can show in a narrow window
const MOST_BRANCHES = 1 << 10;

// What is drawn of an event, by field: whether a value may be. Files come from strangers, and have fields that are not drawn.
const isText = (value) => typeof value === "string";
const integer = (least, most) => (value) => Number.isInteger(value) && value >= least && value <= most;
const maybe = (check) => (value) => value == null || check(value);
const list = (check, most = MOST) => (value) => Array.isArray(value) && value.length <= most && value.every(check);
const isSetting = maybe((value) => typeof value !== "object");
const wrong = (form, value) => Object.keys(form).find((name) => !form[name](value[name]));
const object = (form) => (value) => value != null && !wrong(form, value);
const isPosition = integer(0, MOST - 1), isCount = integer(0, Number.MAX_SAFE_INTEGER);
const isFill = object({ position: isPosition, token: maybe(isText), token_id: isCount, prob: Number.isFinite });
const isBranch = object({ lookahead: maybe(isFill), further: maybe(list(isFill)), score: maybe(Number.isFinite), masks: isCount });
const changes = { fills: list(isFill), edits: maybe(list(isFill)), remasked: maybe(list(isPosition)) };
const FORMS = {
  "diffusion.start": {
    id: isText, prompt: maybe(isText), block_size: integer(1, 1 << 30), first_block: integer(-(1 << 30), 0),
    decoding: (value) => Object(value) === value && list(isSetting, 64)(Object.values(value)),
  },
  "diffusion.step": {
    ...changes, canvas_length: integer(0, MOST), committed: isCount, seconds: (value) => value >= 0 && Number.isFinite(value), text: isText,
    branches: list(isBranch, MOST_BRANCHES), winner: isCount, drafted: maybe(list(isFill)), accepted: maybe(isCount),
  },
  "diffusion.done": {
    ...changes, token_ids: list(isCount), text: isText, finish_reason: maybe(isText),
    lopa: object({ num_forwards: isCount, tokens_per_forward: Number.isFinite }),
  },
  error: { error: object({ message: isText }) },
};

export class Run {
  constructor(label) {
    this.label = label;
    this.start = this.done = null;
    this.problem = "";
    this.events = [];
    this.steps = [];
    this.cells = []; // by position: its fills, each {fill, pass, own (why it is marked), until}: the state has it from number pass to before until
    this.counts = [0]; // filled positions by state
  }

  get last() { return this.steps.length; }
  get text() { return this.done?.text ?? this.steps.at(-1)?.text ?? ""; }
  get seconds() { return this.steps.at(-1)?.seconds ?? 0; }
  get size() { return Math.max(this.steps.at(-1)?.canvas_length ?? 0, this.cells.length); }

  // The fill of a position in state i; undefined if it is masked.
  at(position, i) { return this.cells[position]?.findLast((cell) => cell.pass <= i && i < cell.until); }

  // Takes the next event; raises a Problem if it belongs to no trace of this version.
  add(event, source = "The stream") {
    check(event, source, Boolean(this.start));
    if (event.error) return this.end(event.error.message);
    const isStep = event.object === "diffusion.step";
    this.events.push(event);
    if (!this.start) {
      this.start = event;
      this.label ||= labelOf(event.decoding);
      return;
    }
    if (isStep) this.steps.push(event);
    else this.done = event;
    const remasked = event.remasked ?? [], edits = event.edits ?? [], { fills } = event;
    const { lookahead, further } = isStep ? event.branches[event.winner] : {};
    for (const position of [...remasked, ...edits.map((edit) => edit.position)]) {
      const known = this.cells[position]?.at(-1);
      if (known) known.until = this.last;
    }
    const own = new Map([lookahead, ...(further ?? [])].map((fill) => [fill?.position, "as the winning branch's own token"]));
    for (const { position } of (event.drafted ?? []).slice(0, event.accepted ?? 0)) own.set(position, "as drafted");
    for (const fill of [...fills, ...edits]) {
      (this.cells[fill.position] ??= []).push({ fill, pass: this.last, own: own.get(fill.position), until: Infinity });
    }
    this.counts[this.last] = (this.counts[this.last - isStep] ?? 0) + fills.length - remasked.length;
  }

  // Notes why the stream ended before its last event.
  end(problem) {
    if (this.done || this.problem) return;
    const after = this.last ? ` after ${count(this.last, "pass")}: what is shown is all that came` : " before the first pass";
    this.problem = problem || `The server stopped in mid-answer${after}. See whether it runs, then ask again.`;
  }

  // How the answer ended, in a sentence.
  get ending() {
    if (this.problem) return this.problem;
    if (!this.done) return "";
    const { finish_reason: reason, lopa, token_ids: tokens } = this.done;
    if (reason === "abort") return `The answer was stopped after ${count(this.last, "pass")}: what is shown is not the whole answer.`;
    const length = reason === "length" ? " It ended because it may not be longer: raise max_tokens for more." : "";
    return `${count(tokens.length, "token")} in ${count(lopa.num_forwards, "pass")}, ${lopa.tokens_per_forward.toFixed(1)} a pass.${length}`;
  }

  // The blocks in state i: [{begin, end, state}].
  blocks(i) {
    const step = this.steps[i - 1], { block_size: size, first_block: first, decoding } = this.start ?? {};
    if (!step) return [];
    const isPipelined = decoding.decoding === "d2f" || (decoding.decoding === "lopa" && decoding.base === "d2f");
    const found = [];
    let before = 1, someMasked = false; // share of the block before that is filled: the prompt is
    for (let begin = first; begin < step.canvas_length; begin += size) {
      const end = Math.min(begin + size, step.canvas_length);
      let masks = 0;
      for (let p = Math.max(begin, 0); p < end; p++) masks += !this.at(p, i);
      const isActivated = isPipelined ? before >= decoding.tau_act : decoding.decoding !== "vanilla" && !someMasked;
      const state = masks ? (isActivated ? "activated" : "open") : end <= step.committed ? "committed" : "filled";
      found.push({ begin: Math.max(begin, 0), end, state });
      someMasked ||= masks > 0;
      before = (end - begin - masks) / (end - begin);
    }
    return found;
  }

  // State i in a sentence.
  sentence(i) {
    const step = this.steps[i - 1];
    if (!step) return this.start ? "Before the first pass: nothing is filled." : "Waiting for the server.";
    const own = step.branches[step.winner].lookahead, drafts = step.drafted?.length;
    const anchor = step.branches.length > 1 ? "the anchor won" : "there was no branch";
    const checked = step.accepted == null ? `${count(drafts, "draft")} to check` : `${step.accepted} of ${count(drafts, "draft")} accepted`;
    const who = own ? `branch ${step.winner} won with “${shown(own)}” at ${own.position}` : drafts ? checked : anchor;
    const which = `Pass ${i} of ${this.last}${this.done || this.problem ? "" : " so far"}`;
    return `${which}: ${count(step.fills.length, "position")} filled, ${who}; ${this.counts[i]} of ${step.canvas_length} filled.`;
  }
}

function check(event, source, hasStart) {
  const kind = event.error ? "error" : hasStart ? event.object : "diffusion.start";
  if (!hasStart && event.format !== FORMAT) {
    throw new Problem(`${source} is no trace. Make one with "trace": true in a request, or with LLM.save_trace.`);
  }
  if (!hasStart && event.version !== VERSION) {
    const versions = `has version ${event.version} of the format, and this page reads version ${VERSION}`;
    throw new Problem(`${source} ${versions}: open it with the page of the release that wrote it.`);
  }
  if (!Object.hasOwn(FORMS, kind) || (hasStart && kind === "diffusion.start")) throw new Problem(`${source} has an event that is no pass.`);
  let name = wrong(FORMS[kind], event);
  if (kind === "diffusion.start" && -event.first_block >= event.block_size) name ??= "first_block";
  if (kind === "diffusion.step" && event.winner >= event.branches?.length) name ??= "winner";
  if (!name) return;
  const value = event[name], is = value === undefined ? "is missing" : Object(value) === value ? "is damaged" : `is ${JSON.stringify(value).slice(0, 60)}`;
  throw new Problem(`${source} cannot be shown: in an event ${kind} the field ${name} ${is}.`);
}

// Settings in a line.
export const labelOf = (fields) => Object.entries(fields).map(([name, value]) => (name === "decoding" ? value : `${name} ${value}`)).join(", ");

export const count = (n, what) => `${n} ${what}${n === 1 ? "" : what.endsWith("s") ? "es" : "s"}`;

// A token with its spaces and line breaks visible.
export const shown = (fill) => (fill.token == null ? `#${fill.token_id}` : fill.token.replaceAll(" ", "·").replaceAll("\n", "⏎"));
