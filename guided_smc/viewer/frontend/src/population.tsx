// All particles of one step, as a list to choose from.

import { useEffect, useRef } from "preact/hooks";
import { HELP } from "./glossary";
import { Node, num, oneLine, percent, Run, states } from "./model";

const SIGNS: Record<string, [string, string]> = {
  live: ["", "growing"],
  stopped: ["■", "finished"],
  cut: ["▤", "cut off at max_tokens"],
  dead: ["×", "weight 0"],
  dead_at_cap: ["×", "weight 0: not complete within max_tokens"],
};

export function Population({ run, node, select }: { run: Run; node: Node; select: (n: Node) => void }) {
  const step = run.steps[node.t];
  const most = Math.max(...run.weights[node.t], 1e-12);
  const rewards = Object.entries(step.rewards);
  const list = useRef<HTMLDivElement>(null);
  useEffect(() => {
    const [box, row] = [list.current, list.current?.querySelector<HTMLElement>("[aria-selected=true]")];
    if (!box || !row) return;
    // Not scrollIntoView, which would move the page too.
    const [from, to] = [row.offsetTop, row.offsetTop + row.offsetHeight];
    if (from < box.scrollTop || to > box.scrollTop + box.clientHeight) box.scrollTop = from - box.clientHeight / 2;
  }, [run, node.t, node.s]);
  return (
    <section class="card population" aria-labelledby="population-title">
      <header>
        <h2 id="population-title">Step {step.index}</h2>
        <span class="dim">
          {states(step)} ·{" "}
          <span title={HELP["block size"]}>{step.block_size ? `${step.block_size} drafted at a time` : "no draft"}</span> ·{" "}
          <span title={HELP["effective sample size"]}>effective sample size {num(step.ess, 1)} of {step.log_weights.length}</span>
          {step.resampled ? " · then resampled" : ""}
        </span>
      </header>
      <div class="row head" aria-hidden="true">
        <span class="slot" />
        <span class="weight" title={HELP.weight}>weight</span>
        <span class="sign" />
        {rewards.map(([name]) => <span key={name} class="reward" title={name}>{name.length > 12 ? `${name.slice(0, 11)}…` : name}</span>)}
        <span class="tail">end of the text so far</span>
      </div>
      <div ref={list} class="list" role="listbox" tabIndex={0} aria-label={`Particles at step ${step.index}`} aria-activedescendant={`slot-${node.s}`} data-keys="all">
        {step.log_weights.map((_, s) => {
          const w = run.weights[node.t][s];
          const [sign, title] = SIGNS[step.status[s]];
          const cut = run.children[node.t][s] === 0 && step.resampled;
          return (
            <div
              key={s}
              id={`slot-${s}`}
              role="option"
              aria-selected={s === node.s}
              aria-label={`Particle ${s}, weight ${percent(w)}, ${title}${cut ? ", cut by resampling" : ""}`}
              class={`row${cut ? " cut" : ""}${w === 0 ? " gone" : ""}`}
              onClick={() => select({ t: node.t, s })}
            >
              <span class="slot">{s}</span>
              <span class="weight">
                <i style={{ width: `${(100 * w) / most}%` }} />
                <b>{percent(w)}</b>
              </span>
              <span class="sign" title={title}>{sign}</span>
              {rewards.map(([name, values]) => (
                <span key={name} class="reward" title={`reward ${name}`}>{values[s] === null ? "" : num(values[s])}</span>
              ))}
              <code class="tail"><bdi>{oneLine(run.tail({ t: node.t, s }, 80))}</bdi></code>
            </div>
          );
        })}
      </div>
    </section>
  );
}
