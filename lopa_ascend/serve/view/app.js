// The page: conversation, settings, key, trace files, and the link that holds the settings.

import { drawScale, element } from "./grid.js";
import { Panel } from "./panel.js";
import { Player } from "./player.js";
import { Run, count, labelOf } from "./run.js";
import { Problem, abort, events, load, parse, useKey } from "./server.js";

const FIELDS = {
  decoding: "decoding", num_branches: "branches (k)", block_size: "block size", tau_conf: "tau_conf", tau_add: "tau_add", tau_act: "tau_act",
  max_new_tokens: "most tokens", temperature: "temperature",
};
const PRESETS = { a: "d2f", b: "lopa" }; // what a comparison begins with
const FORM = { type: "object", properties: { city: { type: "string" }, country: { type: "string" } }, required: ["city", "country"] };
const CANVASES = ["parallel", "vanilla", "fast_dllm"]; // decodings that see what is behind a gap
const $ = (id) => document.getElementById(id);

const sides = {}; // by "a" and "b": {fieldset, inputs}
const player = new Player(Object.fromEntries(["play", "back", "forth", "scrub", "by", "speed"].map((id) => [id, $(id)])));
let server = null; // what the server says of itself: {defaults, hasTemplate}
let messages = []; // the conversation
let runs = [];
let stopping = null; // the running request's AbortController
const tries = new Map(); // by button of an example: what it does, other than to ask its text

function tell(problem) {
  if (problem && !(problem instanceof Problem)) console.error(problem);
  const isOurs = !problem || problem instanceof Problem;
  $("problem").textContent = isOurs ? problem?.message ?? "" : `The page failed (${problem.message}): reload it.`;
  $("problem").hidden = !problem;
  $("key").hidden = problem?.status !== 401;
  if (!$("key").hidden) $("key").elements.key.focus();
}

// ---- settings and the link

async function connect() {
  const orNone = (problem) => (problem.status === 404 ? null : Promise.reject(problem));
  const asked = [load("server_info"), load("openapi.json"), load("tokenizer_info").catch(orNone)];
  const [info, { components }, tokenizer] = await Promise.all(asked);
  const isFirst = !server;
  server = { defaults: info.decoding, hasTemplate: Boolean(tokenizer?.chat_template) };
  $("model").textContent = document.title = info.model;
  const schema = components.schemas.DiffusionChatRequest.properties;
  for (const side of Object.keys(PRESETS)) if (!sides[side]) addSide(side, schema);
  readLink();
  if (isFirst && tokenizer) offer(info.limits.properties.attention === "full");
  $("send").disabled = !tokenizer;
  if (!tokenizer) tell(new Problem("The model has no tokenizer, so this page cannot ask it; open a trace file instead."));
  else if (!server.hasTemplate) $("status").textContent = "The model has no chat template: it continues your text, and each text is by itself.";
}

// Adds what can be tried with any model to what the page has for the bundled one, which knows word problems alone.
function offer(seesBehind) {
  const add = (label, run) => {
    const button = element("button", { type: "button", textContent: label });
    $("examples").append(button);
    if (run) tries.set(button, run);
  };
  const given = $("examples").firstChild?.textContent, { decoding, base } = server.defaults;
  const question = given ?? (server.hasTemplate ? "Why is the sky blue? Answer in one sentence." : "The sky is blue because");
  if (!given) add(question);
  add(`With two settings: ${question}`, () => {
    if (!$("compare").checked) $("compare").click();
    ask(question);
  });
  const inForm = "Name a city and its country.";
  if (!given && decoding !== "vanilla") add(`As JSON: ${inForm}`, () => ask(inForm, { structured_outputs: { json: FORM } }));
  if (given || !seesBehind) return;
  const prompt = "Dear Ms. Okafor,\n\nthank you for", suffix = ". It left our warehouse this morning.\n\nKind regards";
  const fills = CANVASES.includes(decoding === "lopa" ? base : decoding) ? {} : { decoding: "parallel" };
  add(`Fill the gap: ${prompt} ___${suffix}`, () => ask(prompt, { suffix, ...fills }));
}

function addSide(side, schema) {
  const legend = element("legend", { textContent: side.toUpperCase() }), inputs = {};
  const fieldset = element("fieldset", {}, legend);
  for (const [name, label] of Object.entries(FIELDS)) {
    const { enum: choices, minimum = "", maximum = "", description } = schema[name], standard = server.defaults[name];
    const options = (choices ?? []).filter(Boolean).map((value) => element("option", { textContent: value }));
    const input = choices
      ? element("select", {}, element("option", { value: "", textContent: `(${standard})` }), ...options)
      : element("input", { placeholder: String(standard ?? ""), inputMode: "decimal", autocomplete: "off" });
    input.title = description + (choices ? "" : ` From ${minimum}${maximum === "" ? "" : ` to ${maximum}`}.`);
    input.name = name;
    inputs[name] = input;
    fieldset.append(element("label", {}, label, " ", input));
  }
  fieldset.addEventListener("input", settle);
  sides[side] = { fieldset, inputs };
  $("sides").append(fieldset);
}

// Hides what has no effect, and keeps the settings in the address.
function settle() {
  const isCompared = $("compare").checked;
  sides.b.fieldset.hidden = !isCompared;
  sides.a.fieldset.firstChild.hidden = !isCompared;
  for (const { inputs } of Object.values(sides)) inputs.num_branches.disabled = (inputs.decoding.value || server.defaults.decoding) !== "lopa";
  const held = new URLSearchParams(isCompared ? { compare: 1 } : {});
  for (const side of shownSides()) for (const [name, value] of Object.entries(fieldsOf(side))) held.set(`${side}.${name}`, value);
  if ($("question").value) held.set("question", $("question").value);
  history.replaceState(null, "", `${location.pathname}${location.search}#${held}`);
}

function readLink() {
  const held = new URLSearchParams(location.hash.slice(1));
  $("compare").checked = held.has("compare");
  for (const [side, { inputs }] of Object.entries(sides)) {
    for (const [name, input] of Object.entries(inputs)) {
      const value = held.get(`${side}.${name}`) ?? "";
      input.value = value;
      if (input.value !== value) tell(new Problem(`The link sets ${name} to ${value}, which this server does not have: choose another.`));
    }
  }
  $("question").value = held.get("question") ?? $("question").value;
  settle();
}

const shownSides = () => ($("compare").checked ? ["a", "b"] : ["a"]);

// What a side sets: numbers as numbers, so that the server refuses what is none.
function fieldsOf(side) {
  const given = Object.entries(sides[side].inputs).filter(([, input]) => input.value.trim() && !input.disabled);
  return Object.fromEntries(given.map(([name, { value }]) => [name, Number.isFinite(Number(value)) ? Number(value) : value.trim()]));
}

// ---- asking

async function ask(question, more = {}) {
  tell(null);
  $("examples").hidden = true;
  const isGap = "suffix" in more, asked = isGap ? ["a"] : shownSides(), isChat = server.hasTemplate && !isGap;
  say("you", "You", isGap ? `${question} ___${more.suffix}` : question);
  const before = messages;
  messages = isGap ? [] : [...messages, { role: "user", content: question }];
  $("question").value = "";
  runs = [];
  busy(true);
  const answers = [];
  for (const side of asked) {
    const own = fieldsOf(side), fields = { ...own, ...more };
    const label = labelOf(own) || "the server's defaults";
    const run = new Run(asked.length > 1 ? `${side.toUpperCase()}: ${label}` : label);
    runs.push(run);
    showRuns();
    answers.push(await answer(run, isChat ? { messages, ...fields } : { prompt: question, ...fields }, isChat));
    if (run.problem) break; // the other setting would only fail again
  }
  busy(false);
  if (!runs[0].text || runs[0].problem) {
    // The question was not answered: it is ready to be asked again, and no part of the conversation.
    messages = before;
    $("question").value ||= question;
  } else {
    messages = isGap ? before : [...messages, { role: "assistant", content: runs[0].text }]; // of a comparison, A's answer goes on
  }
  settle();
  if (runs.length > 1 && !runs.some((run) => run.problem)) {
    player.seek(0);
    player.play();
  }
  $("status").textContent = runs.map((run) => `${runs.length > 1 ? `${run.label}: ` : ""}${run.ending}`).join(" ");
}

// Asks for one answer; the settings of a comparison run one after the other, so that neither slows the other down.
async function answer(run, body, isChat) {
  const line = say("model", run.label, "");
  line.setAttribute("aria-busy", "true"); // read when it is complete
  stopping = new AbortController();
  try {
    const source = isChat ? "v1/diffusion/chat/completions" : "v1/diffusion/completions";
    for await (const event of events(source, body, stopping.signal)) {
      run.add(event);
      line.lastChild.textContent = run.text;
      refresh();
    }
    run.end("");
  } catch (problem) {
    run.end(problem.message);
    tell(problem);
  }
  if (run.ending && (run.problem || run.done.finish_reason === "abort")) say("problem", "", run.ending);
  line.setAttribute("aria-busy", "false");
  refresh();
}

function busy(isBusy) {
  $("send").disabled = $("new").disabled = isBusy;
  $("stop").hidden = !isBusy;
  if (isBusy) $("status").textContent = "The answer grows.";
}

// The server ends a running request, and its stream says so. One that has not begun is just left.
function stop() {
  const id = runs.at(-1)?.start?.id;
  if (id) abort(id).catch(() => stopping.abort());
  else stopping?.abort();
}

function say(kind, who, text) {
  const line = element("p", { className: kind }, ...(who ? [element("b", { textContent: who })] : []), element("span", { textContent: text }));
  $("log").append(line);
  $("log").scrollTop = $("log").scrollHeight;
  return line;
}

// ---- runs on the page

function showRuns() {
  $("panels").replaceChildren();
  player.use(runs.map((run) => new Panel($("panels"), run)));
}

let isDue = false;
// Draws at most once a frame, however many events come.
function refresh() {
  if (isDue) return;
  isDue = true;
  requestAnimationFrame(() => {
    isDue = false;
    player.refresh();
    $("save").disabled = !runs.some((run) => run.last);
  });
}

// ---- trace files

async function open(files) {
  try {
    if (!$("stop").hidden) throw new Problem("An answer still grows: stop it, then open the file.");
    const opened = [];
    for (const file of [...files].slice(0, 2)) {
      const run = new Run("");
      for (const event of parse(await file.text(), file.name)) run.add(event, file.name);
      if (!run.start) throw new Problem(`${file.name} is empty: it holds no trace.`);
      run.end(`The trace ends after ${count(run.last, "pass")}, without the end of the answer.`);
      run.label = `${file.name}: ${run.label}`;
      opened.push(run);
    }
    if (files.length > 2) throw new Problem(`These are ${files.length} files; open one, or two to compare them.`);
    tell(null);
    runs = opened;
    showRuns();
    for (const run of runs) {
      if (run.start.prompt) say("you", "Prompt in the file", run.start.prompt);
      say("model", run.label, run.text);
    }
    refresh();
    $("status").textContent = runs.map((run) => run.ending).join(" ");
  } catch (problem) {
    tell(problem);
  }
}

function save() {
  for (const run of runs) {
    const prompt = messages.findLast((message) => message.role === "user")?.content ?? null;
    const lines = run.events.map((event) => JSON.stringify(event === run.start ? { ...event, prompt: event.prompt ?? prompt } : event));
    const url = URL.createObjectURL(new Blob([lines.map((line) => `${line}\n`).join("")], { type: "application/jsonl" }));
    element("a", { href: url, download: `${run.start.id}.jsonl` }).click();
    URL.revokeObjectURL(url);
  }
}

// ---- start

drawScale($("scale"));
$("settings").open = !matchMedia("(max-width: 62rem)").matches;
$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const question = $("question").value.trim();
  if (question && !$("send").disabled) ask(question);
});
$("examples").addEventListener("click", ({ target }) => {
  if (target.type === "button" && !$("send").disabled) (tries.get(target) ?? ask)(target.textContent);
});
$("question").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("ask").requestSubmit();
});
$("question").addEventListener("change", settle);
$("stop").addEventListener("click", stop);
$("new").addEventListener("click", () => {
  messages = [];
  $("examples").hidden = false;
  $("log").replaceChildren();
  tell(null);
});
$("compare").addEventListener("change", () => {
  const isNew = Object.keys(PRESETS).every((side) => !Object.keys(fieldsOf(side)).length);
  if ($("compare").checked && isNew) for (const [side, name] of Object.entries(PRESETS)) sides[side].inputs.decoding.value = name;
  settle();
});
$("link").addEventListener("click", async () => {
  settle();
  await navigator.clipboard?.writeText(location.href).catch(() => {});
  $("status").textContent = "The address of this page holds the settings and the question; it was copied if the browser allows it.";
});
$("key").addEventListener("submit", async (event) => {
  event.preventDefault();
  try {
    useKey($("key").elements.key.value.trim());
    await connect();
    $("key").reset();
    tell(null);
  } catch (problem) {
    tell(problem);
  }
});
$("file").addEventListener("change", (event) => open(event.target.files).then(() => (event.target.value = "")));
$("save").addEventListener("click", () => Promise.resolve().then(save).catch(tell));
addEventListener("dragover", (event) => {
  event.preventDefault();
  $("panels").classList.add("over");
});
addEventListener("dragleave", () => $("panels").classList.remove("over"));
addEventListener("drop", (event) => {
  event.preventDefault();
  $("panels").classList.remove("over");
  if (event.dataTransfer.files.length) open(event.dataTransfer.files);
});
addEventListener("hashchange", () => server && readLink());
$("send").disabled = true;
connect().catch(tell);
