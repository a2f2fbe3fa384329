// What records hold, and what can be worked out from it: weights, fates, lineages, texts.

export type Status = "live" | "stopped" | "cut" | "dead" | "dead_at_cap";

export interface Step {
  index: number;
  start: number;
  block_size: number;
  live: number;
  ess: number;
  log_evidence: number | null; // null is −∞ here and wherever a logarithm may be
  log_weights: (number | null)[];
  resampled: boolean;
  ancestors: number[];
  tokens: number[][];
  token_log_p: (number | null)[][];
  token_log_q: (number | null)[][];
  allowed: number[][];
  accepting: boolean[][];
  status: Status[];
  log_potentials: Record<string, (number | null)[]>;
  rewards: Record<string, (number | null)[]>;
  seconds: Record<string, number>;
}

export interface Particle {
  text: string;
  weight: number;
}

type TokenTexts = Record<string, string | number[]>;

export interface RunRecord {
  index?: number;
  text?: string | string[] | null;
  value?: unknown;
  finish_reason?: string | null;
  log_evidence?: number | null;
  error?: { type?: string; message?: string; line?: number } | null;
  rewards?: Record<string, { chosen: number; tilted: Estimate; untilted: Estimate }>;
  kl?: Estimate | null;
  seed?: number | string; // a string where it is too large for a number
  restarts?: number;
  warnings?: string[];
  prompt?: unknown;
  sampling?: Record<string, unknown> | null;
  constraint?: string | null;
  selected?: number[];
  diversity?: { ancestors: number[]; independent: number; distinct: number };
  particles?: Particle[];
  steps?: Step[];
  token_texts?: TokenTexts;
  usage?: { seconds?: Record<string, number>; kv_cache?: string; particle_tokens?: number };
  n_tokens?: number | number[];
}

interface Estimate {
  value: number | null;
  std_error: number | null;
}

export interface Node {
  t: number; // position in `steps`
  s: number; // slot
}

export const same = (a: Node | null, b: Node | null) => a?.t === b?.t && a?.s === b?.s;

/** A token as it is shown. */
export interface Token {
  id: number;
  piece: string; // what it adds to the text; empty for a part of a character
  bytes: Uint8Array;
  t: number; // the step that drew it
  bonus: boolean; // drawn from the target, behind what was drafted
  end: boolean;
  logP: number;
  logQ: number;
  allowed: number | null;
  accepting: boolean;
}

const PIECES = new TextEncoder();

/** A run as far as it has come. */
export class Run {
  readonly steps: Step[];
  readonly weights: number[][] = []; // [t][s], normalised
  readonly children: number[][] = []; // [t][s], how many slots continue it
  readonly survives: boolean[][] = []; // [t][s], whether a final particle that counts descends from it
  readonly final: Node[] = []; // [n], where each final particle was last

  constructor(
    readonly record: RunRecord,
    readonly done: boolean = true,
  ) {
    this.steps = (record.steps ?? []).filter((step) => step.tokens?.length);
    for (const step of this.steps) this.weights.push(normalised(step.log_weights));
    const last = this.steps.length - 1;
    this.steps.forEach((step, t) => {
      const counts = new Array<number>(step.log_weights.length).fill(0);
      const goesOn = t < last && this.steps[t + 1].start === step.start;
      if (goesOn || (t === last && !this.allDead(t))) for (const a of step.ancestors) counts[a]++;
      this.children.push(counts);
      this.survives.push(new Array<boolean>(counts.length).fill(false));
    });
    if (last < 0) return;
    this.steps[last].ancestors.forEach((s) => {
      this.final.push({ t: last, s });
      if (this.weights[last][s] > 0) for (const n of this.lineage({ t: last, s })) this.survives[n.t][n.s] = true;
    });
  }

  get widest(): number {
    return Math.max(1, ...this.steps.map((step) => step.log_weights.length));
  }

  allDead(t: number): boolean {
    return this.weights[t].every((w) => w === 0);
  }

  parent(n: Node): Node | null {
    if (n.t === 0 || this.steps[n.t - 1].start !== this.steps[n.t].start) return null;
    return { t: n.t - 1, s: this.steps[n.t - 1].ancestors[n.s] };
  }

  /** Who continues a particle, heaviest first. */
  heirs(n: Node): Node[] {
    const next = this.steps[n.t + 1];
    if (!next || next.start !== this.steps[n.t].start) return [];
    const slots = this.steps[n.t].ancestors.flatMap((a, s) => (a === n.s ? [s] : []));
    const rank = (s: number) => (this.survives[n.t + 1][s] ? 2 : 0) + this.weights[n.t + 1][s];
    return slots.sort((a, b) => rank(b) - rank(a)).map((s) => ({ t: n.t + 1, s }));
  }

  /** From the first step to a particle. */
  lineage(n: Node): Node[] {
    const found: Node[] = [];
    for (let at: Node | null = n; at; at = this.parent(at)) found.push(at);
    return found.reverse();
  }

  /** What came of a particle: its way on to the end, by the heirs that count most. */
  future(n: Node): Node[] {
    const found: Node[] = [];
    for (let at = this.heirs(n)[0]; at; at = this.heirs(at)[0]) found.push(at);
    return found;
  }

  /** Where the answer was last; null while nobody knows. */
  get answer(): Node | null {
    const chosen = this.record.selected?.[0];
    return chosen === undefined ? null : (this.final[chosen] ?? null);
  }

  /** The texts of final particles that count, heaviest first, each with its heaviest particle. */
  get texts(): { text: string; weight: number; node: Node }[] {
    const found = new Map<string, { text: string; weight: number; node: Node; most: number }>();
    this.record.particles?.forEach(({ text, weight }, i) => {
      const node = this.final[i];
      if (!weight || !node) return;
      const one = found.get(text) ?? { text, weight: 0, node, most: 0 };
      one.weight += weight;
      if (weight > one.most) [one.node, one.most] = [node, weight];
      found.set(text, one);
    });
    return [...found.values()].sort((a, b) => b.weight - a.weight);
  }

  /** The particle to look at first: the answer, or the heaviest. */
  get first(): Node | null {
    const t = this.steps.length - 1;
    if (t < 0) return null;
    if (this.answer) return this.answer;
    const s = this.weights[t].indexOf(Math.max(...this.weights[t]));
    return { t, s: Math.max(s, 0) };
  }

  private bytesOf(id: number): Uint8Array {
    const text = this.record.token_texts?.[id];
    return typeof text === "string" ? PIECES.encode(text) : Uint8Array.from(text ?? []);
  }

  /** The tokens of a particle, up to and with a step. */
  tokens(n: Node): Token[] {
    const decoder = new TextDecoder("utf-8", { ignoreBOM: true });
    const found: Token[] = [];
    for (const { t, s } of this.lineage(n)) {
      const step = this.steps[t];
      step.tokens[s].forEach((id, k) => {
        const bytes = this.bytesOf(id);
        const lastDrawn = k === step.tokens[s].length - 1;
        found.push({
          id,
          piece: decoder.decode(bytes, { stream: true }),
          bytes,
          t,
          bonus: k === step.block_size,
          end: bytes.length === 0 && lastDrawn && step.status[s] === "stopped",
          logP: step.token_log_p[s][k] ?? -Infinity,
          logQ: step.token_log_q[s][k] ?? -Infinity,
          allowed: step.allowed[s]?.[k] ?? null,
          accepting: step.accepting[s]?.[k] ?? false,
        });
      });
    }
    return found;
  }

  /** The end of a particle's text, for where there is little room. */
  tail(n: Node, length: number): string {
    const parts: Uint8Array[] = [];
    let room = length;
    for (let at: Node | null = n; at && room > 0; at = this.parent(at)) {
      const ids = this.steps[at.t].tokens[at.s];
      for (let k = ids.length - 1; k >= 0 && room > 0; k--) {
        const bytes = this.bytesOf(ids[k]);
        parts.push(bytes);
        room -= bytes.length;
      }
    }
    const all = new Uint8Array(parts.reduce((sum, part) => sum + part.length, 0));
    let at = 0;
    for (const part of parts.reverse()) {
      all.set(part, at);
      at += part.length;
    }
    const begun = all.findIndex((byte) => (byte & 0xc0) !== 0x80); // not in the middle of a character
    return new TextDecoder().decode(all.subarray(Math.max(begun, 0)));
  }

  /** What became of a particle at a step, in words. */
  fate(n: Node): string {
    const step = this.steps[n.t];
    const status = step.status[n.s];
    if (status === "dead_at_cap") return "died: not a whole answer when it reached max_tokens";
    if (status === "dead") return `died: ${this.cause(n)}`;
    const how = status === "stopped" ? "finished" : status === "cut" ? "cut off at max_tokens" : "growing";
    const copies = this.children[n.t][n.s];
    const last = n.t === this.steps.length - 1;
    if (copies === 0 && (step.resampled || !last)) {
      if (this.weights[n.t][n.s] === 0) return `${how}, with weight 0`;
      return `${how}, then cut: resampling gave its place to heavier particles`;
    }
    const answer = last && this.done && same(this.answer, n) ? ", the answer" : "";
    if (copies > 1) return `${how}, then copied: ${copies} particles continue it${answer && ", one of them the answer"}`;
    if (last && this.done && status === "live") return "growing when the run broke off";
    if (last && this.done) return `${how}${answer || ", a final particle"}`;
    return step.resampled ? `${how}, and kept by resampling` : how;
  }

  private cause(at: Node): string {
    let n = at; // the step at which it died
    for (let p = this.parent(n); p && this.steps[p.t].status[p.s] === "dead"; p = this.parent(n)) n = p;
    const step = this.steps[n.t];
    for (const [name, scores] of Object.entries(step.log_potentials)) {
      if (scores[n.s] === null) return `“${name}” gives this text the weight 0`;
    }
    const asked = step.allowed[n.s] ?? [];
    if (asked.length > step.tokens[n.s].length) {
      const left = asked[asked.length - 1];
      if (left === 0) return "a dead end: the constraint allows no token here";
      return `none of the ${left} allowed tokens has a probability here`;
    }
    if (step.token_log_p[n.s].includes(null)) return "the target gives a drafted token the probability 0";
    if (!step.tokens[n.s].length && !this.parent(n)) return "it has weight 0";
    if (asked.length) return "the constraint refused its last token";
    return "it has weight 0";
  }
}

/** A number of things, with its noun. */
export const count = (n: number, noun: string) => `${n.toLocaleString("en")} ${noun}${n === 1 ? "" : "s"}`;

/** What the particles of a step are doing after it, in words. */
export function states(step: Step): string {
  const of = (...these: Status[]) => step.status.filter((s) => these.includes(s)).length;
  const told: [number, string, string][] = [
    [of("live"), "is still growing", "are still growing"],
    [of("stopped"), "has finished", "have finished"],
    [of("cut"), "was cut at max_tokens", "were cut at max_tokens"],
    [of("dead", "dead_at_cap"), "has died", "have died"],
  ];
  return told
    .filter(([n]) => n)
    .map(([n, one, more], i) => `${n}${i ? "" : ` of ${count(step.status.length, "particle")}`} ${n === 1 ? one : more}`)
    .join(", ");
}

export function normalised(logs: (number | null)[]): number[] {
  const finite = logs.filter((x): x is number => x !== null);
  if (!finite.length) return logs.map(() => 0);
  const most = Math.max(...finite);
  const weights = logs.map((x) => (x === null ? 0 : Math.exp(x - most)));
  const sum = weights.reduce((a, b) => a + b, 0);
  return weights.map((w) => w / sum);
}

/** JSON whose seeds keep all their digits, where the browser can tell them. */
export const parse = (text: string) =>
  JSON.parse(text, ((name: string, value: unknown, context?: { source?: string }) =>
    name === "seed" && typeof value === "number" && !Number.isSafeInteger(value) ? (context?.source ?? value) : value) as any);

/** The prompt as one text. */
export function promptText(prompt: unknown): string {
  if (typeof prompt === "string") return prompt;
  if (Array.isArray(prompt) && prompt.every((m) => m && typeof m === "object" && "role" in m)) {
    if (prompt.length === 1 && prompt[0].role === "user" && typeof prompt[0].content === "string") return prompt[0].content;
    return prompt.map((m) => `${m.role}: ${typeof m.content === "string" ? m.content : JSON.stringify(m.content)}`).join("\n\n");
  }
  return prompt === undefined || prompt === null ? "" : JSON.stringify(prompt);
}

export function answerText(record: RunRecord): string {
  const text = record.text;
  return Array.isArray(text) ? text.join("\n") : (text ?? "");
}

const PICTURES: Record<string, string> = { "\t": "→\t", "\n": "↵\n", "\r": "␍" };

/** A text whose characters can all be seen: none may hide, or turn its neighbours around. */
export function visible(text: string): string {
  return text.replace(
    // Controls, separators, and marks of direction or without width.
    /[\u0000-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g,
    (c) => {
      const code = c.charCodeAt(0);
      if (c in PICTURES) return PICTURES[c];
      if (code < 0x20) return String.fromCharCode(0x2400 + code);
      if (code === 0x7f) return "\u2421";
      return `⟨${code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
    },
  );
}

/** The same on one line. */
export const oneLine = (text: string) => visible(text).replace(/[\n\t]/g, "");

export function num(x: number | null | undefined, digits = 2): string {
  if (x === null || x === -Infinity) return "−∞";
  if (x === undefined || Number.isNaN(x)) return "–";
  if (x === Infinity) return "∞";
  const text = Math.abs(x) >= 1e5 || (x !== 0 && Math.abs(x) < 0.5 * 10 ** -digits) ? x.toExponential(1) : x.toFixed(digits);
  return text.replace("-", "−");
}

export function percent(x: number): string {
  if (x === 0) return "0 %";
  if (x < 1e-4) return "< 0.01 %";
  return `${(100 * x).toFixed(x < 1e-3 ? 2 : 1)} %`;
}

export const seconds = (s: number) => (s >= 1 ? `${s.toFixed(2)} s` : s >= 1e-3 ? `${(1e3 * s).toFixed(s >= 0.1 ? 0 : 1)} ms` : `${(1e6 * s).toFixed(0)} µs`);
