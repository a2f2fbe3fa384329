import { render } from "preact";
import { useCallback, useEffect, useMemo, useState } from "preact/hooks";
import { Genealogy } from "./genealogy";
import { Keys, useWalk } from "./keys";
import { Live } from "./live";
import { Node, percent, Run, RunRecord } from "./model";
import { ParticlePanel } from "./particle";
import { Population } from "./population";
import { Entry, Runs, Summary } from "./summary";

type Theme = "auto" | "light" | "dark";

function useTheme(): [Theme, () => void] {
  const [theme, setTheme] = useState<Theme>(() => {
    try {
      return (localStorage.getItem("guided-smc-theme") as Theme | null) ?? "auto";
    } catch {
      return "auto"; // storage is forbidden
    }
  });
  useEffect(() => {
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    try {
      localStorage.setItem("guided-smc-theme", theme);
    } catch {
      // it lasts as long as the page, then
    }
  }, [theme]);
  return [theme, () => setTheme({ auto: "dark", dark: "light", light: "auto" }[theme] as Theme)];
}

function View({ entry }: { entry: Entry }) {
  const run = useMemo(() => new Run(entry.record, entry.done), [entry]);
  const [chosen, choose] = useState<Node | null>(null);
  const select = useCallback((n: Node) => choose(n), []);
  const fits = chosen && chosen.t < run.steps.length && chosen.s < run.steps[chosen.t].log_weights.length;
  const node = fits ? chosen : run.first;
  useWalk(run, node, select);
  return (
    <>
      <Summary run={run} select={select} />
      {node ? (
        <>
          <Genealogy run={run} selected={node} select={select} />
          <div class="pair">
            <Population run={run} node={node} select={select} />
            <ParticlePanel run={run} node={node} select={select} />
          </div>
          <p class="unseen" role="status" aria-live="polite" data-testid="selection">
            {`Step ${run.steps[node.t].index}, particle ${node.s}, weight ${percent(run.weights[node.t][node.s])}: ${run.fate(node)}`}
          </p>
        </>
      ) : (
        <section class="card empty">
          {entry.record.error ? (
            <p>There is nothing to draw: a run that breaks off leaves no steps in its record.</p>
          ) : run.done ? (
            <p>This record has no steps to show. <code>guided-smc generate … --full</code> writes them.</p>
          ) : (
            <p>Waiting for the first step …</p>
          )}
        </section>
      )}
    </>
  );
}

function App({ records, live }: { records: RunRecord[]; live: boolean }) {
  const [entries, setEntries] = useState<Entry[]>(() => records.map((record) => ({ record, done: true })));
  const [current, setCurrent] = useState(0);
  const [theme, nextTheme] = useTheme();
  const show = useCallback((record: RunRecord, done: boolean, first: boolean) => {
    // The newest run stands first, and keeps its number as others come.
    setEntries((old) => {
      const index = first ? old.length : old[0].record.index;
      return [{ record: { ...record, index }, done }, ...(first ? old : old.slice(1))];
    });
    if (first) setCurrent(0);
  }, []);
  const entry = entries[current];
  const aside = live || entries.length > 1;
  return (
    <>
      <header class="page">
        <h1>{document.title}</h1>
        <span class="tools">
          <Keys />
          <button type="button" onClick={nextTheme} aria-label={`Colours: ${theme}. Change`}>
            {{ auto: "◐ auto", light: "☀ light", dark: "☾ dark" }[theme]}
          </button>
        </span>
      </header>
      <div class={aside ? "with-aside" : ""}>
        {aside ? (
          <aside>
            {live ? <Live show={show} /> : null}
            {entries.length > 1 ? <Runs entries={entries} current={current} choose={setCurrent} /> : null}
          </aside>
        ) : null}
        <main>
          {entry ? (
            <View key={entries.length - current} entry={entry} />
          ) : (
            <section class="card empty">
              <p>{live ? "Run a prompt to see what its particles do." : "There are no records."}</p>
            </section>
          )}
        </main>
      </div>
    </>
  );
}

const data = JSON.parse(document.getElementById("records")!.textContent!) as RunRecord[] | null;
render(<App records={data ?? []} live={data === null} />, document.getElementById("app")!);
