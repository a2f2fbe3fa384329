// What was asked and what came of it, and the list of runs.

import { useMemo, useState } from "preact/hooks";
import { answerText, Node, num, oneLine, percent, promptText, Run, RunRecord, seconds, visible } from "./model";

function Fact({ name, value, title }: { name: string; value: any; title?: string }) {
  return (
    <div class="fact" title={title}>
      <dt>{name}</dt>
      <dd>{value}</dd>
    </div>
  );
}

export function badge(record: RunRecord, done: boolean): [string, string] {
  if (record.error) return ["failed", record.error.type ?? "failed"];
  if (!done) return ["running", "running"];
  return [record.finish_reason ?? "stop", record.finish_reason ?? "done"];
}

const MOST_TEXTS = 6;

/** What the posterior looks like: different texts with their weights. */
function Texts({ run, select }: { run: Run; select: (n: Node) => void }) {
  const texts = run.texts;
  if (texts.length < 2) return null;
  const rest = texts.slice(MOST_TEXTS).reduce((sum, t) => sum + t.weight, 0);
  return (
    <div class="posterior">
      <h3>All final texts, by weight</h3>
      <ul>
        {texts.slice(0, MOST_TEXTS).map(({ text, weight, node }) => (
          <li key={text}>
            <button type="button" onClick={() => select(node)} title="show this particle">
              <span class="weight">
                <i style={{ width: `${100 * weight}%` }} />
                <b>{percent(weight)}</b>
              </span>
              <code>{oneLine(text) || "(empty)"}</code>
            </button>
          </li>
        ))}
      </ul>
      {texts.length > MOST_TEXTS ? <p class="dim">{texts.length - MOST_TEXTS} more: {percent(rest)}</p> : null}
    </div>
  );
}

export function Summary({ run, select }: { run: Run; select: (n: Node) => void }) {
  const { record, steps } = run;
  const prompt = promptText(record.prompt);
  const answer = answerText(record);
  const [kind, label] = badge(record, run.done);
  const last = steps[steps.length - 1];
  const evidence = record.log_evidence !== undefined && run.done ? record.log_evidence : last?.log_evidence;
  const total = Object.values(record.usage?.seconds ?? {}).reduce((a, b) => a + b, 0);
  const sampling = record.sampling ?? {};
  const rewards = Object.entries(record.rewards ?? {});
  return (
    <section class="card summary" aria-labelledby="summary-title">
      <header>
        <h2 id="summary-title">
          Answer <span class={`badge ${kind}`}>{label}</span>
        </h2>
        <span class="dim">{record.index === undefined ? "" : `record ${record.index}`}</span>
      </header>
      <div class="texts">
        {prompt ? (
          <div>
            <h3>Prompt</h3>
            <pre tabIndex={0}>{visible(prompt).replace(/↵\n/g, "\n")}</pre>
          </div>
        ) : null}
        <div>
          <h3>{record.error ? "Error" : "Text"}</h3>
          {record.error ? <p class="error" role="alert"><b>{record.error.type}</b>{record.error.line ? ` (line ${record.error.line})` : ""}: {visible(record.error.message ?? "")}</p> : null}
          {record.error && answer ? <h3 class="second">Best partial text</h3> : null}
          {answer ? <pre tabIndex={0} data-testid="answer">{visible(answer).replace(/↵\n/g, "\n")}</pre> : run.done ? null : <p class="dim">Known when the run ends: until then any particle may be cut.</p>}
        </div>
      </div>
      <Texts run={run} select={select} />
      {record.warnings?.map((w, i) => <p key={i} class="warning">{visible(w)}</p>)}
      <dl class="facts">
        {evidence !== undefined ? <Fact name="log-evidence" value={num(evidence)} title="log of the estimated probability that the model says something which the constraint and the rewards like" /> : null}
        {record.kl ? <Fact name="KL to the model" value={`${num(record.kl.value)} nats`} /> : null}
        {record.diversity ? <Fact name="independent answers" value={num(record.diversity.independent, 1)} title="effective number of independent answers" /> : null}
        {record.diversity ? <Fact name="distinct texts" value={num(record.diversity.distinct, 1)} title="effective number of different texts" /> : null}
        {rewards.map(([name, r]) => <Fact key={name} name={name} value={`${num(r.chosen)}  (mean ${num(r.untilted.value)} → ${num(r.tilted.value)})`} title="reward of the answer; its means without and with the tilt" />)}
        {record.constraint ? <Fact name="constraint" value={oneLine(record.constraint)} /> : null}
        {last ? <Fact name="particles" value={steps[0].log_weights.length} /> : null}
        {last ? <Fact name="steps" value={steps.length} /> : null}
        {steps.length ? <Fact name="resamplings" value={steps.filter((s) => s.resampled).length} /> : null}
        {record.restarts ? <Fact name="restarts" value={record.restarts} /> : null}
        {total ? <Fact name="time" value={seconds(total)} /> : null}
        {record.seed !== undefined ? <Fact name="seed" value={record.seed} /> : null}
        {typeof sampling.temperature === "number" ? <Fact name="temperature" value={sampling.temperature} /> : null}
        {sampling.power !== undefined && sampling.power !== 1 ? <Fact name="power" value={sampling.power as number} /> : null}
        {record.usage?.particle_tokens ? <Fact name="particle tokens" value={record.usage.particle_tokens.toLocaleString("en")} /> : null}
      </dl>
    </section>
  );
}

export interface Entry {
  record: RunRecord;
  done: boolean;
}

const MOST_SHOWN = 200;
const ARROWS = { ArrowUp: -1, ArrowDown: 1 };
const LIST_KEYS = { ...ARROWS, PageUp: -10, PageDown: 10, Home: -MOST_SHOWN, End: MOST_SHOWN };

export function Runs({ entries, current, choose }: { entries: Entry[]; current: number; choose: (i: number) => void }) {
  const [query, setQuery] = useState("");
  const haystacks = useMemo(
    () => entries.map(({ record }) => [promptText(record.prompt), answerText(record), record.error?.type, record.error?.message, record.index].join("\n").toLowerCase()),
    [entries],
  );
  const words = query.toLowerCase().split(/\s+/).filter(Boolean);
  const found = entries.map((_, i) => i).filter((i) => words.every((w) => haystacks[i].includes(w)));
  const shown = found.slice(0, MOST_SHOWN);
  const key = (moves: Record<string, number>) => (event: KeyboardEvent) => {
    const move = moves[event.key];
    if (!move || !shown.length) return;
    event.preventDefault();
    const at = shown.indexOf(current);
    const to = shown[Math.max(0, Math.min(shown.length - 1, at + move))];
    choose(to);
    document.getElementById(`run-${to}`)?.scrollIntoView({ block: "nearest" });
  };
  return (
    <nav class="card runs" aria-label="Records">
      <input type="search" placeholder={`Search ${entries.length} records`} aria-label="Search records" value={query} onInput={(e) => setQuery((e.target as HTMLInputElement).value)} onKeyDown={key(ARROWS)} />
      <div class="list" role="listbox" tabIndex={0} aria-label="Records" aria-activedescendant={`run-${current}`} onKeyDown={key(LIST_KEYS)}>
        {shown.map((i) => {
          const { record, done } = entries[i];
          const [kind, label] = badge(record, done);
          return (
            <div key={i} id={`run-${i}`} role="option" aria-selected={i === current} class="run" onClick={() => choose(i)}>
              <span class="slot">{record.index ?? i}</span>
              <span class="run-texts">
                <span class="run-prompt">{oneLine(promptText(record.prompt)) || "(prompt not recorded)"}</span>
                <span class="run-answer">{oneLine(answerText(record)) || record.error?.message || ""}</span>
              </span>
              {kind !== "stop" ? <span class={`badge ${kind}`}>{label}</span> : null}
            </div>
          );
        })}
        {found.length > shown.length ? <p class="dim">{found.length - shown.length} more: search to see them</p> : null}
        {found.length ? null : <p class="dim">nothing found</p>}
      </div>
    </nav>
  );
}
