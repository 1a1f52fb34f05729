// What the tokens of LLM engines cost: columns of the Cost view, and the engine of a pod beside its
// use of the GPU.

import { fact, h, place, plain, showText } from "./dom.js";
import { amount, count, duration, listed, money, percent } from "./format.js";

const MILLION = 1e6;
const RISE = 1.2; // of the time to the first token, to be worth a sentence
const LEAST_WAIT = 0.01; // of the time, to be worth a sentence
const STEP_SECONDS = 300; // of the regression
const OWN_LIMIT =
  "Requests wait, and no other container has the GPU: the engine itself is at its limit";
const HINTS = {
  prompt_tokens: "Tokens of prompts that the LLM engines read",
  generated_tokens: "Tokens that the LLM engines generated",
  per_million: [
    "Cost of the pods with LLM engines, for a million tokens of prompts and answers.",
    "Idle time and waiting are included.",
  ].join(" "),
  at_use: [
    "The same, as if the pods had paid for the GPU time that they used, and for nothing else.",
    "Compares models and engines, also on shared GPUs.",
  ].join(" "),
  prompt_cost: "A million prompt tokens, for the GPU time used: by a regression over 5 minutes",
  generated_cost:
    "A million generated tokens, for the GPU time used: by a regression over 5 minutes",
  joules_per_token: "Energy of the pods with LLM engines, divided by their tokens",
};

// Columns of a table of rows of `/api/v1/range`. `price(value)` writes money.
export function tokenColumns(price, rows) {
  const column = (name, title, write, value) => ({ name, title, hint: HINTS[name], value, write });
  const perMillion = (name, title, value) => column(name, `Per\u00a0M ${title}`, price, value);
  const split = [
    perMillion("prompt_cost", "prompt tokens", (row) => row.tokens?.per_million?.prompt_cost),
    perMillion(
      "generated_cost",
      "generated tokens",
      (row) => row.tokens?.per_million?.generated_cost,
    ),
  ];
  const isSplit = rows.some((row) => row.tokens?.per_million);
  return [
    { name: "model", title: "Model", value: (row) => (row.pod ? row.model : undefined) },
    column("prompt_tokens", "Prompt tokens", tokenText, (row) => row.prompt_tokens),
    column("generated_tokens", "Generated tokens", tokenText, (row) => row.generated_tokens),
    perMillion("per_million", "tokens", (row) => row.tokens?.cost_per_million?.total),
    perMillion("at_use", "tokens, time\u00a0used", (row) => row.tokens?.cost_per_million_at_use),
    ...(isSplit ? split : []),
    column("joules_per_token", "J per token", jouleText, (row) => row.tokens?.joules_per_token),
  ];
}

// Whether a range has tokens, so that it can be grouped by model.
export function hasTokens(answer) {
  return answer?.totals?.prompt_tokens !== undefined;
}

export function tokenText(number) {
  return number >= MILLION ? `${amount(number / MILLION)}\u00a0M` : count(number);
}

function jouleText(joules) {
  return Number(joules.toPrecision(3)).toString();
}

// Facts about the tokens of a pod since its start. `data`: of `/api/v1/summary`.
export function tokenFacts(data) {
  const { tokens, prompt_tokens: read, generated_tokens: generated } = data;
  if (!tokens) return [];
  const price = (value) => money(value, data.currency);
  const facts = [fact("Tokens", `${tokenText(read)} read, ${tokenText(generated)} generated`)];

  const { cost_per_million: cost, cost_per_million_at_use: atUse } = tokens;
  if (cost) {
    const { used, waiting, idle } = cost;
    const split = `used ${price(used)}, waiting ${price(waiting)}, idle ${price(idle)}`;
    facts.push(fact("Cost per million tokens", `${price(cost.total)} (${split})`));
  }
  if (atUse !== undefined) facts.push(fact("Of the time used, per million tokens", price(atUse)));
  facts.push(...splitFacts(tokens, price));
  const { joules_per_token: joules, reason } = tokens;
  if (joules !== undefined) facts.push(fact("Energy per token", `${jouleText(joules)} J`));
  if (reason) facts.push(fact("Cost per token", `not known: ${plain(reason)}`));
  return facts;
}

// Facts about prompt and generated tokens, each by itself, or why this is not known.
function splitFacts({ per_million: split, per_million_reason: reason }, price) {
  if (!split && !reason) return [];
  if (!split) return [fact("Prompt and generated, each", `not known: ${plain(reason)}`)];
  const text = (cost, seconds) => {
    const isPriced = cost !== undefined;
    return listed([isPriced && price(cost), `${amount(seconds)} GPU-seconds`]);
  };
  const error = `${percent(split.residual_ratio)} of the GPU time of 5 minutes`;
  const length = duration(STEP_SECONDS * split.steps);
  return [
    fact("Million prompt tokens", text(split.prompt_cost, split.prompt_gpu_seconds)),
    fact("Million generated tokens", text(split.generated_cost, split.generated_gpu_seconds)),
    fact("Error of these two", `${error}, by regression over ${length}`),
  ];
}

// The engines of a pod now: their queue beside the use of the GPU and waiting.
export class Engines {
  constructor() {
    this.title = h("h2", {}, "LLM engine");
    this.says = h("p", { class: "about" });
    this.facts = h("dl", { class: "facts" });
    this.element = h("section", { class: "engine" }, this.title, this.says, this.facts);
  }

  // `holders`: the pod, once for each GPU that it holds.
  show(holders) {
    // A pod without an address is starting or has ended.
    const all = holders.filter(({ engine }) => engine && engine.reason !== "no_address");
    const known = all.find(({ engine }) => engine.engine);
    const shown = known ?? all[0];
    this.element.hidden = !shown;
    if (!shown) return;
    showText(this.says, known ? whyText(known) : "");
    place(this.facts, engineFacts(shown.engine));
  }
}

// Says whether a slow engine waits for the GPU, or for its own queue.
function whyText({ engine, waited }) {
  const slow = slowText(engine);
  if (waited >= LEAST_WAIT) {
    return `${percent(waited)} of the time another container had the GPU${slow}.`;
  }
  if (engine.requests_waiting > 0) return `${OWN_LIMIT}${slow}.`;
  return "";
}

function slowText({ first_token_seconds: seconds, first_token_before_seconds: before }) {
  if (seconds === undefined) return "";
  const text = `; the slowest 5 % of requests got their first token after ${firstToken(seconds)}`;
  const isSlower = before !== undefined && seconds >= RISE * before;
  if (!isSlower) return `${text} or more`;
  return `${text} or more, and after ${firstToken(before)} in the half hour before`;
}

function firstToken(seconds) {
  return seconds < 1 ? `${Math.round(seconds * 1000)} ms` : duration(seconds);
}

function engineFacts(engine) {
  const facts = [];
  const add = (title, value, write) => {
    if (value !== undefined) facts.push(fact(title, write(value)));
  };
  const rate = (value) => `${tokenText(Math.round(value))}/s`;
  if (engine.engine) {
    const names = [engine.engine, engine.model].filter(Boolean).join(": ");
    facts.push(fact("Engine", plain(names)));
  }
  add("Prompts read", engine.prompt_tokens_per_second, rate);
  add("Tokens generated", engine.generated_tokens_per_second, rate);
  add("Requests running", engine.requests_running, count);
  add("Requests waiting", engine.requests_waiting, count);
  add("First token (p95)", engine.first_token_seconds, firstToken);
  add("Cache used", engine.cache_ratio, percent);
  if (engine.reason) facts.push(fact("Not read", plain(engine.message || engine.reason)));
  return facts;
}
