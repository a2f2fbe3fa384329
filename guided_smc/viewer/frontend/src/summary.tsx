// What was asked and what came of it, and the list of runs.

import { useMemo, useState } from "preact/hooks";
import { Glossary, HELP } from "./glossary";
import { answerText, count, Node, num, oneLine, percent, promptText, Run, RunRecord, seconds, visible } from "./model";

function Fact({ name, value, title }: { name: string; value: any; title?: string }) {
  return (
    <div class="fact" title={title}>
      <dt>{name}</dt>
      <dd>{value}</dd>
    </div>
  );
}

const HOW: Record<string, string> = {
  stop: "finish_reason stop: the answer ends where the model, or a stop string, ended it",
  length: "finish_reason length: the answer was not finished when it had max_tokens tokens",
  failed: "finish_reason failed: no particle has any weight",
};

export function badge(record: RunRecord, done: boolean): [string, string] {
  if (record.error) return ["failed", record.error.type ?? "failed"];
  if (!done) return ["running", "running"];
  const reason = record.finish_reason ?? "stop";
  return [reason, { stop: "finished", length: "cut at max_tokens", failed: "all particles died" }[reason] ?? reason];
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
  const islands = typeof sampling.islands === "number" ? sampling.islands : 1;
  const alive = !!record.particles?.some((p) => p.weight);
  return (
    <section class="card summary" aria-labelledby="summary-title">
      <header>
        <h2 id="summary-title">
          Answer <span class={`badge ${kind}`} title={record.error ? "" : HOW[kind]}>{label}</span>
        </h2>
        <span class="dim">{record.index === undefined ? "" : `record ${record.index}`}</span>
      </header>
      <div class="texts">
        {record.prompt !== undefined ? (
          <div>
            <h3>Prompt</h3>
            <pre tabIndex={0}>{visible(prompt).replace(/↵\n/g, "\n") || <span class="dim">(empty)</span>}</pre>
          </div>
        ) : null}
        <div>
          <h3>{record.error ? "Error" : "Text"}</h3>
          {record.error ? <p class="error" role="alert"><b>{record.error.type}</b>{record.error.line ? ` (line ${record.error.line})` : ""}: {visible(record.error.message ?? "")}</p> : null}
          {record.error && answer ? <h3 class="second">Best partial text</h3> : null}
          {answer ? <pre tabIndex={0} data-testid="answer">{visible(answer).replace(/↵\n/g, "\n")}</pre> : run.done ? (
            record.error ? null : <p class="dim">The answer is an empty text.</p>
          ) : <p class="dim">Known when the run ends: until then any particle may be cut.</p>}
        </div>
      </div>
      <Texts run={run} select={select} />
      {record.warnings?.map((w, i) => <p key={i} class="warning">{visible(w)}</p>)}
      <dl class="facts">
        {evidence !== undefined && (last || !record.error) ? <Fact name="log-evidence" value={evidence === null ? num(null) : `${num(evidence)} nats`} title={HELP["log-evidence"]} /> : null}
        {record.kl ? <Fact name="KL to the model" value={`${num(record.kl.value)} nats`} title={HELP["KL to the model"]} /> : null}
        {record.diversity && alive ? <Fact name="independent answers" value={`in effect ${num(record.diversity.independent, 1)}`} title={HELP["independent answers"]} /> : null}
        {record.diversity && alive ? <Fact name="different texts" value={`${run.texts.length}, in effect ${num(record.diversity.distinct, 1)}`} title={HELP["different texts"]} /> : null}
        {rewards.map(([name, r]) => (
          <Fact
            key={name}
            name={`reward “${name}”`}
            value={`${num(r.chosen)} (mean ${num(r.tilted.value)}, untilted ${num(r.untilted.value)})`}
            title="The reward of the answer. In brackets, its mean over the answers that were asked for, and its estimated mean over what the model would say without the reward."
          />
        ))}
        {record.constraint ? <Fact name="constraint" value={oneLine(record.constraint)} title="What every answer has to fit." /> : null}
        {last ? <Fact name="particles" value={`${steps[0].log_weights.length}${last.log_weights.length === steps[0].log_weights.length ? "" : `, ${last.log_weights.length} in the end`}${islands > 1 ? `, on ${islands} islands` : ""}`} title={islands > 1 ? `${HELP.particle} Islands are populations that never mix, weighed by their evidence.` : HELP.particle} /> : null}
        {last ? <Fact name="resampled" value={`${steps.filter((s) => s.resampled).length} of ${count(steps.length, "step")}`} title={HELP.resampled} /> : null}
        {record.restarts ? <Fact name="restarts" value={record.restarts} title={HELP.restarts} /> : null}
        {total ? <Fact name="time" value={seconds(total)} title={HELP.time} /> : null}
        {record.seed !== undefined ? <Fact name="seed" value={record.seed} title={HELP.seed} /> : null}
        {typeof sampling.temperature === "number" ? <Fact name="temperature" value={sampling.temperature} title="Of the target: below 1 it prefers what is likely, above 1 it is more even." /> : null}
        {sampling.power !== undefined && sampling.power !== 1 ? <Fact name="power α" value={sampling.power as number} title="The model's probabilities of whole texts are taken to this power." /> : null}
        {record.usage?.particle_tokens ? <Fact name="particle tokens" value={record.usage.particle_tokens.toLocaleString("en")} title={HELP["particle tokens"]} /> : null}
      </dl>
      {last ? <Glossary /> : null}
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
                <span class="run-prompt">{oneLine(promptText(record.prompt)) || (record.prompt === undefined ? "(prompt not recorded)" : "(empty prompt)")}</span>
                <span class="run-answer">{oneLine(answerText(record)) || oneLine(record.error?.message ?? "")}</span>
                {kind !== "stop" ? <span class={`badge ${kind}`}>{label}</span> : null}
              </span>
            </div>
          );
        })}
        {found.length > shown.length ? <p class="dim">{found.length - shown.length} more: search to see them</p> : null}
        {found.length ? null : <p class="dim">nothing found</p>}
      </div>
    </nav>
  );
}
