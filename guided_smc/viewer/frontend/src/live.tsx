// A prompt box over a running server, whose steps are shown as they come.

import { useEffect, useRef, useState } from "preact/hooks";
import { editJson } from "./editor";
import { parse, RunRecord, states, Step } from "./model";

const SCHEMA = `{
  "type": "object",
  "properties": {
    "name": {"type": "string", "maxLength": 30},
    "age": {"type": "integer", "minimum": 0, "maximum": 120},
    "trade": {"enum": ["sailor", "smith", "baker"]}
  },
  "required": ["name", "age", "trade"],
  "additionalProperties": false
}`;

type Kind = "free" | "schema" | "regex" | "choice" | "grammar";

const KINDS: Record<Kind, string> = { free: "free text", schema: "JSON schema", regex: "pattern", choice: "one of", grammar: "Lark grammar" };
const HINTS: Partial<Record<Kind, string>> = {
  regex: "[A-Z][a-z]+ is [1-9][0-9]? years old\\.",
  choice: "yes\nno\nperhaps",
  grammar: 'start: WORD ("," WORD)*\nWORD: /[a-z]+/',
};

/** Server-sent events of a response, as name and data. */
export async function* eventsOf(body: ReadableStream<Uint8Array>): AsyncGenerator<[string, string]> {
  const reader = body.pipeThrough(new TextDecoderStream() as any).getReader() as ReadableStreamDefaultReader<string>;
  let left = "";
  for (;;) {
    const { done, value } = await reader.read().catch(() => {
      throw new Error("the connection to the server broke off before the run ended: is the server still running?");
    });
    if (done) return;
    left += value;
    const blocks = left.split(/\r?\n\r?\n/);
    left = blocks.pop()!;
    for (const block of blocks) {
      let name = "message";
      const data: string[] = [];
      for (const line of block.split(/\r?\n/)) {
        if (line.startsWith("event:")) name = line.slice(6).trim();
        else if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
      }
      if (data.length) yield [name, data.join("\n")];
    }
  }
}

interface Props {
  /** Shows a run; the last call for it says that it is done. */
  show: (record: RunRecord, done: boolean, first: boolean) => void;
}

/** What the user can mend in a field of the form. */
class FieldError extends Error {
  constructor(
    message: string,
    readonly field: string,
  ) {
    super(message);
  }
}

/** The schema as it was written: a number of JavaScript's would round what it holds. */
function schemaOf(text: string): string {
  if (!text.trim()) throw new Error("the schema is empty: write one, or choose free text");
  let schema: unknown;
  try {
    schema = JSON.parse(text);
  } catch (error) {
    throw new Error(`the schema is no JSON: ${(error as Error).message}`);
  }
  if (!schema || typeof schema !== "object" || Array.isArray(schema)) throw new Error('a schema is an object, such as {"type": "integer"}');
  return text;
}

/** Why the server has refused a request, as a user of this page can mend it. */
async function refusal(response: Response, key: string): Promise<Error> {
  if (response.status === 401) return new FieldError(key ? "the server does not accept this API key" : "the server asks for an API key: fill in the field", "key");
  const told = await response.json().catch(() => null);
  const message: string = told?.error?.message ?? `the server answered with status ${response.status}`;
  return response.status === 413 ? new FieldError(`the prompt is too long for this server: ${message}`, "prompt") : new Error(message);
}

export function Live({ show }: Props) {
  const [prompt, setPrompt] = useState("Invent a sailor, as JSON.");
  const [kind, setKind] = useState<Kind>("schema");
  const schema = useRef(SCHEMA);
  const [texts, setTexts] = useState<Partial<Record<Kind, string>>>(HINTS);
  const [options, setOptions] = useState({ n_particles: "8", block_size: "", max_tokens: "96", temperature: "1", seed: "0" });
  const [key, setKey] = useState("");
  const [running, setRunning] = useState<AbortController | null>(null);
  const [said, say] = useState<{ text: string; bad: boolean } | null>(null);
  const box = useRef<HTMLDivElement>(null);
  useEffect(() => {
    if (kind !== "schema" || !box.current) return;
    const view = editJson(box.current, schema.current, (text) => (schema.current = text));
    return () => view.destroy();
  }, [kind]);

  const number = (name: keyof typeof options) => {
    const text = options[name].trim();
    if (text === "") return undefined;
    if (!Number.isFinite(Number(text))) throw new FieldError(`${name.replaceAll("_", " ").replace("n particles", "particles")}: “${text}” is no number`, name);
    if (Number(text) > Number.MAX_SAFE_INTEGER) throw new FieldError(`${name}: ${text} is more than this page can send exactly (${Number.MAX_SAFE_INTEGER})`, name);
    return Number(text);
  };

  const request = (): Record<string, unknown> => {
    const body: Record<string, unknown> = {
      messages: [{ role: "user", content: prompt }],
      max_tokens: number("max_tokens"),
      temperature: number("temperature"),
      seed: number("seed"),
      smc: { n_particles: number("n_particles"), ...(options.block_size.trim() ? { block_size: options.block_size.trim() === "auto" ? "auto" : number("block_size") } : {}) },
    };
    const text = texts[kind] ?? "";
    if (kind === "schema") body.guided_json = schemaOf(schema.current);
    if (kind === "regex") body.guided_regex = text;
    if (kind === "choice") body.guided_choice = text.split("\n").filter((line) => line !== "");
    if (kind === "grammar") body.guided_grammar = text;
    return body;
  };

  const run = async () => {
    const stop = new AbortController();
    let record: RunRecord = { prompt, steps: [], token_texts: {} };
    let started = false;
    let frame = 0;
    const paint = () => {
      frame = 0;
      show({ ...record }, false, !started);
      started = true;
    };
    const finish = (last: RunRecord) => {
      cancelAnimationFrame(frame);
      show(last, true, !started);
      started = true;
    };
    setRunning(stop);
    say({ text: "waiting for the server …", bad: false });
    try {
      const body = request();
      if (/[^\x21-\x7e]/.test(key)) throw new FieldError("the API key has characters that no key has, such as spaces or accents", "key");
      const response = await fetch("smc/run", {
        method: "POST",
        headers: { "Content-Type": "application/json", Accept: "text/event-stream", ...(key ? { Authorization: `Bearer ${key}` } : {}) },
        body: JSON.stringify(body),
        signal: stop.signal,
      }).catch(() => {
        throw new Error("the server cannot be reached: is it still running?");
      });
      if (!response.ok || !response.body) throw await refusal(response, key);
      let ended = false;
      for await (const [name, data] of eventsOf(response.body)) {
        if (data === "[DONE]") break;
        const event = parse(data);
        if (name === "start") {
          record = { ...record, sampling: { ...event, method: "smc" } };
          if (event.prompt !== undefined) record.prompt = event.prompt;
          say({ text: "running …", bad: false });
        } else if (name === "step") {
          const step = event as Step & { token_texts: Record<string, string | number[]> };
          record.steps = [...record.steps!, step];
          record.token_texts = { ...record.token_texts, ...step.token_texts };
          if (!frame) frame = requestAnimationFrame(paint);
          say({ text: `step ${step.index}: ${states(step)} …`, bad: false });
        } else if (name === "result") {
          ended = true;
          finish({ prompt, ...event });
          say(null);
        } else if (name === "error") {
          throw new Error(event.error?.message ?? event.message ?? "the run failed");
        }
      }
      if (!ended) throw new Error("the server closed the connection before the run ended");
    } catch (error) {
      const message = error instanceof Error ? error.message : String(error);
      if (error instanceof FieldError) document.querySelector<HTMLElement>(`.live [name=${error.field}]`)?.focus();
      const cancelled = stop.signal.aborted;
      say({ text: cancelled ? "cancelled" : message, bad: !cancelled });
      if (record.steps!.length) finish({ ...record, error: { type: cancelled ? "Cancelled" : "Broken off", message: cancelled ? "The run was cancelled." : message } });
    } finally {
      setRunning(null);
    }
  };

  const option = (name: keyof typeof options, label: string, title: string) => (
    <label title={title}>
      {label}
      <input type="text" inputMode="decimal" name={name} value={options[name]} placeholder={name === "block_size" ? "default" : name === "seed" ? "any" : ""} onInput={(e) => setOptions({ ...options, [name]: (e.target as HTMLInputElement).value })} />
    </label>
  );
  return (
    <form
      class="card live"
      aria-label="Try a prompt"
      onSubmit={(e) => {
        e.preventDefault();
        if (!running) void run();
      }}
      onKeyDown={(e) => {
        if (e.key === "Enter" && (e.ctrlKey || e.metaKey) && !running) (e.preventDefault(), e.stopPropagation(), void run());
      }}
    >
      <label>
        Prompt
        <textarea name="prompt" rows={3} value={prompt} required onInput={(e) => setPrompt((e.target as HTMLTextAreaElement).value)} />
      </label>
      <fieldset class="kinds">
        <legend>Answer</legend>
        {(Object.keys(KINDS) as Kind[]).map((k) => (
          <label key={k} class={k === kind ? "on" : ""}>
            <input type="radio" name="kind" value={k} checked={k === kind} onChange={() => setKind(k)} />
            {KINDS[k]}
          </label>
        ))}
      </fieldset>
      {kind === "schema" ? (
        <div ref={box} class="editor" />
      ) : kind === "free" ? null : (
        <label>
          {kind === "choice" ? "One answer a line" : KINDS[kind]}
          <textarea name="language" class="code" rows={kind === "regex" ? 2 : 5} value={texts[kind]} onInput={(e) => setTexts({ ...texts, [kind]: (e.target as HTMLTextAreaElement).value })} />
        </label>
      )}
      <div class="options">
        {option("n_particles", "particles", "N: more are closer to the posterior")}
        {option("block_size", "block size", "K: tokens drafted before each verification; a number, or auto")}
        {option("max_tokens", "max tokens", "before the end token")}
        {option("temperature", "temperature", "of the target")}
        {option("seed", "seed", "the same seed gives the same run")}
        <label title="sent with the request, and kept nowhere">
          API key
          <input type="password" name="key" autocomplete="off" placeholder="if the server asks" value={key} onInput={(e) => setKey((e.target as HTMLInputElement).value)} />
        </label>
      </div>
      <div class="go">
        {running ? (
          // A key each: as one element, the click that cancels would then submit.
          <button key="cancel" type="button" onClick={() => running.abort()}>Cancel</button>
        ) : (
          <button key="run" type="submit" class="primary">Run <kbd>Ctrl ↵</kbd></button>
        )}
        <span role="status" class={said?.bad ? "error" : "dim"}>{said?.text}</span>
      </div>
    </form>
  );
}
