// What the tokens of LLM engines cost: columns of the Cost view, and the engine of a pod beside its use of the GPU.

import { fact, h, place, plain, setText } from "./dom.js";
import { amount, count, duration, money, percent } from "./format.js";

const MILLION = 1e6;
const RISE = 1.2; // of the time to the first token, to be worth a sentence
const HINTS = {
  prompt_tokens: "Tokens of prompts that the LLM engines read",
  generated_tokens: "Tokens that the LLM engines generated",
  per_million:
    "Cost of the pods with LLM engines, for a million tokens of prompts and answers. Idle time and waiting are included.",
  at_use:
    "The same, as if the pods had paid for the GPU time that they used, and for nothing else. Compares models and engines, also on shared GPUs.",
  prompt_cost: "A million prompt tokens, for the GPU time used: by a regression over 5 minutes",
  generated_cost:
    "A million generated tokens, for the GPU time used: by a regression over 5 minutes",
  joules_per_token: "Energy of the pods with LLM engines, divided by their tokens",
};

// Columns of a table of rows of `/api/v1/range`. `price(value)` writes money.
export function tokenColumns(price, rows) {
  const column = (name, title, write, value) => ({ name, title, hint: HINTS[name], value, write });
  const split = [
    column(
      "prompt_cost",
      "Per\u00a0M prompt tokens",
      price,
      (row) => row.tokens?.per_million?.prompt_cost,
    ),
    column(
      "generated_cost",
      "Per\u00a0M generated tokens",
      price,
      (row) => row.tokens?.per_million?.generated_cost,
    ),
  ];
  return [
    { name: "model", title: "Model", value: (row) => (row.pod ? row.model : undefined) },
    column("prompt_tokens", "Prompt tokens", tokenText, (row) => row.prompt_tokens),
    column("generated_tokens", "Generated tokens", tokenText, (row) => row.generated_tokens),
    column("per_million", "Per\u00a0M tokens", price, (row) => row.tokens?.cost_per_million?.total),
    column(
      "at_use",
      "Per\u00a0M tokens, time\u00a0used",
      price,
      (row) => row.tokens?.cost_per_million_at_use,
    ),
    ...(rows.some((row) => row.tokens?.per_million) ? split : []),
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
  const { tokens } = data;
  if (!tokens) return [];
  const parts = tokens.cost_per_million;
  const price = (value) => money(value, data.currency);
  const split =
    parts &&
    `used ${price(parts.used)}, waiting ${price(parts.waiting)}, idle ${price(parts.idle)}`;
  return [
    fact(
      "Tokens",
      `${tokenText(data.prompt_tokens)} read, ${tokenText(data.generated_tokens)} generated`,
    ),
    parts && fact("Cost per million tokens", `${price(parts.total)} (${split})`),
    tokens.cost_per_million_at_use !== undefined &&
      fact("Of the time used, per million tokens", price(tokens.cost_per_million_at_use)),
    ...splitFacts(tokens, price),
    tokens.joules_per_token !== undefined &&
      fact("Energy per token", `${jouleText(tokens.joules_per_token)} J`),
    tokens.reason && fact("Cost per token", `not known: ${plain(tokens.reason)}`),
  ].filter(Boolean);
}

// Facts about prompt and generated tokens, each by itself, or why this is not known.
function splitFacts({ per_million: split, per_million_reason: reason }, price) {
  if (!split)
    return reason ? [fact("Prompt and generated, each", `not known: ${plain(reason)}`)] : [];
  const text = (cost, seconds) =>
    [cost !== undefined && price(cost), `${amount(seconds)} GPU-seconds`]
      .filter(Boolean)
      .join(", ");
  return [
    fact("Million prompt tokens", text(split.prompt_cost, split.prompt_gpu_seconds)),
    fact("Million generated tokens", text(split.generated_cost, split.generated_gpu_seconds)),
    fact(
      "Error of these two",
      `${percent(split.residual_ratio)} of the GPU time of 5 minutes, by regression over ${duration(300 * split.steps)}`,
    ),
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

  // `held`: pairs of a device and a holder of the pod.
  show(held) {
    const all = held
      .map(([, holder]) => holder)
      .filter(({ engine }) => engine && engine.reason !== "no_address");
    const known = all.filter((holder) => holder.engine.engine);
    this.element.hidden = !all.length;
    if (!all.length) return;
    const [first] = known.length ? known : all;
    setText(this.says, known.length ? sayWhy(first) : "");
    this.says.hidden = !this.says.textContent;
    place(this.facts, engineFacts(first.engine));
  }
}

// Says whether a slow engine waits for the GPU, or for its own queue.
function sayWhy({ engine, waited }) {
  const slow = slowText(engine);
  if (waited >= 0.01) return `${percent(waited)} of the time another container had the GPU${slow}.`;
  if (engine.requests_waiting > 0)
    return `Requests wait, and no other container has the GPU: the engine itself is at its limit${slow}.`;
  return "";
}

function slowText({ first_token_seconds: seconds, first_token_before_seconds: before }) {
  if (seconds === undefined) return "";
  if (before !== undefined && seconds >= RISE * before) {
    return `; the slowest 5 % of requests got their first token after ${firstToken(seconds)} or more, and after ${firstToken(before)} in the half hour before`;
  }
  return `; the slowest 5 % of requests got their first token after ${firstToken(seconds)} or more`;
}

function firstToken(seconds) {
  return seconds < 1 ? `${Math.round(seconds * 1000)} ms` : duration(seconds);
}

function engineFacts(engine) {
  const rate = (value) => `${tokenText(Math.round(value))}/s`;
  return [
    engine.engine &&
      fact("Engine", plain([engine.engine, engine.model].filter(Boolean).join(": "))),
    engine.prompt_tokens_per_second !== undefined &&
      fact("Prompts read", rate(engine.prompt_tokens_per_second)),
    engine.generated_tokens_per_second !== undefined &&
      fact("Tokens generated", rate(engine.generated_tokens_per_second)),
    engine.requests_running !== undefined &&
      fact("Requests running", count(engine.requests_running)),
    engine.requests_waiting !== undefined &&
      fact("Requests waiting", count(engine.requests_waiting)),
    engine.first_token_seconds !== undefined &&
      fact("First token (p95)", firstToken(engine.first_token_seconds)),
    engine.cache_ratio !== undefined && fact("Cache used", percent(engine.cache_ratio)),
    engine.reason && fact("Not read", plain(engine.message || engine.reason)),
  ].filter(Boolean);
}
