// Steps from left to right, a row for each slot; under it what the whole population did.
//
// All marks of a kind are one path, so that a run of 32 × 100 particles is some twenty elements, and
// hovering and selecting redraw an overlay only.

import { memo } from "preact/compat";
import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import { scaleLinear } from "d3-scale";
import { line as lineOf } from "d3-shape";
import { HELP, PHASES as DOES } from "./glossary";
import { Node, num, oneLine, percent, Run, same, seconds } from "./model";

const PHASES = Object.keys(DOES);

const GUTTER = 90;
const RIGHT = 18;
const TOP = 22;
const TRACK = 54;
const GAP = 26;

interface Layout {
  run: Run;
  width: number;
  dx: number;
  rowH: number;
  treeH: number;
  height: number;
  x: (t: number) => number;
  y: (s: number) => number;
  radius: (n: Node) => number;
  track: (i: number) => number; // its top
}

function layOut(run: Run, available: number): Layout {
  const steps = Math.max(run.steps.length, 1);
  const rows = run.widest;
  const rowH = rows <= 8 ? 26 : rows <= 16 ? 19 : rows <= 40 ? 13 : Math.max(5, 520 / rows);
  const room = available - GUTTER - RIGHT;
  const dx = Math.max(8, Math.min(64, room / steps));
  const width = Math.max(available, GUTTER + RIGHT + steps * dx);
  const treeH = rows * rowH;
  const most = Math.min(rowH * 0.56, dx * 0.46);
  const radius = ({ t, s }: Node) => {
    const w = run.weights[t][s] * run.weights[t].length;
    return Math.max(1.1, Math.min(most, rowH * 0.3 * Math.sqrt(w)));
  };
  return {
    run,
    width,
    dx,
    rowH,
    treeH,
    height: TOP + treeH + GAP + 3 * (TRACK + GAP),
    x: (t) => GUTTER + (t + 0.5) * dx,
    y: (s) => TOP + (s + 0.5) * rowH,
    radius,
    track: (i) => TOP + treeH + GAP + i * (TRACK + GAP),
  };
}

const dot = (x: number, y: number, r: number) =>
  `M${(x - r).toFixed(1)} ${y.toFixed(1)}a${r.toFixed(2)} ${r.toFixed(2)} 0 1 0 ${(2 * r).toFixed(2)} 0a${r.toFixed(2)} ${r.toFixed(2)} 0 1 0 ${(-2 * r).toFixed(2)} 0z`;
const box = (x: number, y: number, r: number) => `M${(x - r).toFixed(1)} ${(y - r).toFixed(1)}h${(2 * r).toFixed(2)}v${(2 * r).toFixed(2)}h${(-2 * r).toFixed(2)}z`;
const cross = (x: number, y: number, r: number) =>
  `M${(x - r).toFixed(1)} ${(y - r).toFixed(1)}l${(2 * r).toFixed(2)} ${(2 * r).toFixed(2)}m0 ${(-2 * r).toFixed(2)}l${(-2 * r).toFixed(2)} ${(2 * r).toFixed(2)}`;

function link(L: Layout, from: Node, to: Node): string {
  const [x0, y0, x1, y1] = [L.x(from.t), L.y(from.s), L.x(to.t), L.y(to.s)];
  if (y0 === y1) return `M${x0.toFixed(1)} ${y0.toFixed(1)}H${x1.toFixed(1)}`;
  const m = (x0 + x1) / 2;
  return `M${x0.toFixed(1)} ${y0.toFixed(1)}C${m.toFixed(1)} ${y0.toFixed(1)} ${m.toFixed(1)} ${y1.toFixed(1)} ${x1.toFixed(1)} ${y1.toFixed(1)}`;
}

const way = (L: Layout, nodes: Node[]) => nodes.slice(1).map((n, i) => link(L, nodes[i], n)).join("");

/** Everything but the selection. */
const Picture = memo(function Picture({ L }: { L: Layout }) {
  const { run } = L;
  const d = { kept: "", lost: "", rest: "", on: "", off: "", ended: "", endedOff: "", dead: "" };
  run.steps.forEach((step, t) => {
    step.log_weights.forEach((_, s) => {
      const n = { t, s };
      const from = run.parent(n);
      const before = from ? run.steps[from.t].status[from.s] : "live";
      const alive = run.survives[t][s];
      if (from) {
        if (alive && before === "live") d.kept += link(L, from, n);
        else if (alive) d.rest += link(L, from, n);
        else if (before !== "dead" && before !== "dead_at_cap") d.lost += link(L, from, n);
      }
      const [x, y, r] = [L.x(t), L.y(s), L.radius(n)];
      const status = step.status[s];
      if (before !== "live") {
        if (status !== "dead" && status !== "dead_at_cap") d[alive ? "on" : "off"] += dot(x, y, Math.min(r, 1.6));
      } else if (status === "dead" || status === "dead_at_cap") d.dead += cross(x, y, Math.min(3.2, L.dx * 0.3, L.rowH * 0.3));
      else if (status === "live") d[alive ? "on" : "off"] += dot(x, y, r);
      else d[alive ? "ended" : "endedOff"] += box(x, y, Math.max(r * 0.9, 2));
    });
  });
  const answer = run.answer && run.done ? way(L, run.lineage(run.answer)) : "";
  return (
    <g>
      {run.steps.map((step, t) =>
        step.resampled ? (
          <rect key={t} class="resampled" x={L.x(t) + L.dx * 0.3} width={L.dx * 0.4} y={TOP - 4} height={L.treeH + 8} rx={2} />
        ) : null,
      )}
      <path class="answer-way" d={answer} />
      <path class="link lost" d={d.lost} />
      <path class="link rest" d={d.rest} />
      <path class="link kept" d={d.kept} />
      <path class="node off" d={d.off} />
      <path class="node ended off" d={d.endedOff} />
      <path class="node dead" d={d.dead} />
      <path class="node on" d={d.on} />
      <path class="node ended" d={d.ended} />
      <Islands L={L} />
      <Axis L={L} />
      <Slots L={L} />
      <Ess L={L} />
      <Evidence L={L} />
      <Times L={L} />
    </g>
  );
});

function islandsOf(run: Run): number {
  const islands = run.record.sampling?.islands;
  return typeof islands === "number" ? islands : 1;
}

function Slots({ L }: { L: Layout }) {
  const rows = L.run.widest;
  const every = Math.max(1, Math.ceil(13 / L.rowH));
  return (
    <g class="axis stay">
      <rect class="gutter" y={0} width={GUTTER - 16} height={TOP - 4} />
      <rect class="gutter" y={TOP - 4} width={GUTTER - 4} height={L.treeH + 12} />
      <text class="title" x={8} y={TOP - 9}>Particles</text>
      {Array.from({ length: rows }, (_, s) =>
        s % every === 0 ? (
          <text key={s} x={GUTTER - 10} y={L.y(s) + 3.5} text-anchor="end">{s}</text>
        ) : null,
      )}
    </g>
  );
}

function Islands({ L }: { L: Layout }) {
  const islands = islandsOf(L.run);
  return (
    <g>
      {Array.from({ length: islands - 1 }, (_, i) => {
        const y = TOP + ((i + 1) * L.treeH) / islands;
        return <line key={i} class="island" x1={GUTTER} x2={L.width - RIGHT} y1={y} y2={y} />;
      })}
    </g>
  );
}

function Axis({ L }: { L: Layout }) {
  const steps = L.run.steps;
  const every = [1, 2, 5, 10, 20, 50, 100, 200, 500].find((n) => n * L.dx >= 30) ?? 1000;
  return (
    <g class="axis">
      {steps.map((step, t) =>
        step.index % every === 0 ? (
          <text key={t} x={L.x(t)} y={TOP - 9} text-anchor="middle">{step.index ? step.index : "step 0"}</text>
        ) : null,
      )}
      {steps.map((step, t) =>
        t > 0 && step.start !== steps[t - 1].start ? (
          <g key={t}>
            <line class="restart" x1={L.x(t) - L.dx / 2} x2={L.x(t) - L.dx / 2} y1={TOP - 6} y2={L.height} />
            <text class="restart-label" x={L.x(t) - L.dx / 2 + 4} y={L.height - 8}>start {step.start + 1}</text>
          </g>
        ) : null,
      )}
    </g>
  );
}

interface TrackProps {
  L: Layout;
  i: number;
  title: string;
  help: string;
  top: string;
  bottom: string;
  between?: any; // a label
  children: any;
}

function Track({ L, i, title, help, top, bottom, between, children }: TrackProps) {
  const y = L.track(i);
  return (
    <g class="track">
      <line class="base" x1={GUTTER} x2={L.width - RIGHT} y1={y + TRACK} y2={y + TRACK} />
      {children}
      <g class="stay">
        <rect class="gutter" y={y - GAP + 8} width={GUTTER - 4} height={TRACK + GAP - 4} />
        <text class="title" x={8} y={y - 7}><title>{help}</title>{title}</text>
        <text x={GUTTER - 10} y={y + 7} text-anchor="end">{top}</text>
        {between}
        <text x={GUTTER - 10} y={y + TRACK} text-anchor="end">{bottom}</text>
      </g>
    </g>
  );
}

function Ess({ L }: { L: Layout }) {
  const { steps } = L.run;
  const y0 = L.track(0) + TRACK;
  const scale = scaleLinear([0, L.run.widest], [y0, L.track(0)]);
  // A curve for each start: a restart is a new population.
  const line = lineOf<number>((t) => L.x(t), (t) => scale(steps[t].ess));
  const starts = [...new Set(steps.map((step) => step.start))];
  const path = starts.map((start) => line(steps.flatMap((step, t) => (step.start === start ? [t] : []))) ?? "").join("");
  const share = L.run.record.sampling?.ess_threshold;
  const at = typeof share === "number" && L.run.record.sampling?.method === "smc" && islandsOf(L.run) === 1 ? share * (steps[0]?.log_weights.length ?? 0) : 0;
  const fixed = at > 0 && !L.run.record.sampling?.target_ess;
  // Only where it keeps clear of the labels at both ends.
  const apart = scale(at) > y0 - TRACK + 16 && scale(at) < y0 - 14;
  const label = fixed && apart ? (
    <text x={GUTTER - 10} y={scale(at) + 4} text-anchor="end"><title>resampled below this</title>{`↻ < ${num(at, Number.isInteger(at) ? 0 : 1)}`}</text>
  ) : null;
  return (
    <Track L={L} i={0} title={`Effective sample size, of ${L.run.widest}`} help={HELP["effective sample size"]} top={`${L.run.widest}`} bottom="0" between={label}>
      {fixed ? <line class="threshold" x1={GUTTER} x2={L.width - RIGHT} y1={scale(at)} y2={scale(at)} /> : null}
      <path class="curve" d={path} />
      {L.dx > 16 ? <path class="curve-dots plain" d={steps.map((s, t) => dot(L.x(t), scale(s.ess), 2)).join("")} /> : null}
      <path class="curve-dots" d={steps.map((s, t) => (s.resampled ? dot(L.x(t), scale(s.ess), Math.min(2.6, L.dx * 0.35)) : "")).join("")} />
    </Track>
  );
}

function Evidence({ L }: { L: Layout }) {
  const { steps } = L.run;
  const known = steps.map((s) => s.log_evidence).filter((x): x is number => x !== null);
  let [low, high] = [Math.min(0, ...known), Math.max(0, ...known)];
  if (high - low < 1e-6) [low, high] = [low - 0.5, high + 0.5];
  const scale = scaleLinear([low, high], [L.track(1) + TRACK, L.track(1)]);
  const path =
    lineOf<number>((t) => L.x(t), (t) => scale(steps[t].log_evidence ?? low)).defined((t) => steps[t].log_evidence !== null)(steps.map((_, t) => t)) ?? "";
  return (
    <Track L={L} i={1} title="Log-evidence so far, nats" help={HELP["log-evidence"]} top={num(high, 1)} bottom={num(low, 1)}>
      {low < 0 && high > 0 ? <line class="threshold" x1={GUTTER} x2={L.width - RIGHT} y1={scale(0)} y2={scale(0)} /> : null}
      <path class="curve evidence" d={path} />
      {L.dx > 16 ? <path class="curve-dots evidence" d={steps.map((s, t) => (s.log_evidence === null ? "" : dot(L.x(t), scale(s.log_evidence), 2))).join("")} /> : null}
    </Track>
  );
}

function Times({ L }: { L: Layout }) {
  const { steps } = L.run;
  const totals = steps.map((s) => PHASES.reduce((sum, p) => sum + (s.seconds[p] ?? 0), 0));
  const most = Math.max(...totals, 1e-9);
  const y0 = L.track(2) + TRACK;
  const bar = Math.max(2, Math.min(L.dx * 0.7, 26));
  const used = steps.map(() => 0);
  return (
    <Track L={L} i={2} title="Time of each step, by phase" help={HELP.time} top={seconds(most)} bottom="0">
      {PHASES.map((phase) => {
        const d = steps.map((s, t) => {
          const h = ((s.seconds[phase] ?? 0) / most) * TRACK;
          const y = y0 - used[t] - h;
          used[t] += h;
          return h < 0.05 ? "" : `M${(L.x(t) - bar / 2).toFixed(1)} ${y.toFixed(2)}h${bar.toFixed(1)}v${h.toFixed(2)}h${(-bar).toFixed(1)}z`;
        });
        return <path key={phase} class={`phase ${phase}`} d={d.join("")} />;
      })}
    </Track>
  );
}

function Overlay({ L, selected, hovered }: { L: Layout; selected: Node | null; hovered: Node | null }) {
  const { run } = L;
  const there = (n: Node | null): n is Node => !!n && n.t < run.steps.length && n.s < run.steps[n.t].log_weights.length;
  return (
    <g>
      {there(selected) ? (
        <g class="selected">
          <rect class="now" x={L.x(selected.t) - L.dx / 2} width={L.dx} y={TOP - 20} height={L.height - TOP + 8} />
          <path class="future" d={way(L, [selected, ...run.future(selected)])} />
          <path class="way" d={way(L, run.lineage(selected))} />
          <circle cx={L.x(selected.t)} cy={L.y(selected.s)} r={Math.max(L.radius(selected) + 2.5, 5)} />
        </g>
      ) : null}
      {there(hovered) && !same(hovered, selected) ? (
        <g class="hovered">
          <path class="way" d={way(L, run.lineage(hovered))} />
          <circle cx={L.x(hovered.t)} cy={L.y(hovered.s)} r={Math.max(L.radius(hovered) + 2, 4.5)} />
        </g>
      ) : null}
    </g>
  );
}

function Tip({ L, n, at }: { L: Layout; n: Node; at: { x: number; y: number } }) {
  const { run } = L;
  const step = run.steps[n.t];
  const flip = at.x > window.innerWidth - 330;
  return (
    <div class="tip" role="presentation" style={{ left: `${at.x + (flip ? -14 : 14)}px`, top: `${at.y + 14}px`, transform: flip ? "translateX(-100%)" : "" }}>
      <b>step {step.index} · particle {n.s}</b>
      <div>weight {percent(run.weights[n.t][n.s])} <span class="dim">(log-weight {num(step.log_weights[n.s])} nats)</span></div>
      <div>{run.fate(n)}</div>
      <code>…{oneLine(run.tail(n, 60))}</code>
    </div>
  );
}

interface Props {
  run: Run;
  selected: Node | null;
  select: (n: Node) => void;
}

export function Genealogy({ run, selected, select }: Props) {
  const frame = useRef<HTMLDivElement>(null);
  const [available, setAvailable] = useState(900);
  const [hovered, hover] = useState<{ n: Node; at: { x: number; y: number } } | null>(null);
  useLayoutEffect(() => {
    const measure = () => setAvailable(Math.max(320, frame.current?.clientWidth ?? 0));
    measure();
    const observer = new ResizeObserver(measure);
    observer.observe(frame.current!);
    return () => observer.disconnect();
  }, []);
  const L = useMemo(() => layOut(run, available), [run, available]);

  useEffect(() => {
    if (!selected || !frame.current) return;
    const [x, view] = [L.x(selected.t), frame.current];
    if (x < view.scrollLeft + GUTTER + 20 || x > view.scrollLeft + view.clientWidth - 40) view.scrollLeft = x - view.clientWidth / 2;
  }, [selected?.t, selected?.s, L]);

  const nearest = (event: MouseEvent): Node | null => {
    const rect = (event.currentTarget as Element).getBoundingClientRect();
    if (event.clientX - frame.current!.getBoundingClientRect().left < GUTTER) return null; // the labels, however far it is scrolled
    const t = Math.round((event.clientX - rect.left - GUTTER) / L.dx - 0.5);
    if (t < 0 || t >= run.steps.length) return null;
    const y = event.clientY - rect.top;
    const s = Math.round((y - TOP) / L.rowH - 0.5);
    if (y > TOP + L.treeH + GAP / 2) return { t, s: Math.min(selected?.s ?? 0, run.steps[t].log_weights.length - 1) };
    return s >= 0 && s < run.steps[t].log_weights.length ? { t, s } : null;
  };

  const phases = PHASES.filter((p) => run.steps.some((s) => s.seconds[p]));
  const total = run.record.usage?.seconds ?? {};
  const spent = (p: string) => total[p] ?? run.steps.reduce((sum, s) => sum + (s.seconds[p] ?? 0), 0);
  return (
    <section class="card genealogy" aria-labelledby="genealogy-title">
      <header>
        <h2 id="genealogy-title">Genealogy</h2>
        <ul class="legend" aria-label="Legend">
          <li><i class="mark on" />has heirs at the end</li>
          <li><i class="mark off" />has none</li>
          <li><i class="mark ended" />finished</li>
          <li><i class="mark dead">×</i>died (weight 0)</li>
          <li title={HELP.resampled}><i class="mark band" />resampled</li>
          {islandsOf(run) > 1 ? <li><i class="mark isle" />between islands</li> : null}
          {run.answer ? <li><i class="mark answer" />the answer</li> : null}
          <li class="dim" title={HELP.weight}>the larger, the more weight</li>
        </ul>
      </header>
      <div
        ref={frame}
        class="frame"
        tabIndex={0}
        role="application"
        aria-label={`Genealogy of ${run.widest} particles over ${run.steps.length} steps`}
        aria-describedby="genealogy-keys"
        data-keys="all"
        onScroll={(e) => e.currentTarget.style.setProperty("--scrolled", `${e.currentTarget.scrollLeft}px`)}
      >
        <div
          class="layers"
          style={{ width: `${L.width}px`, height: `${L.height}px` }}
          aria-hidden="true"
          onMouseMove={(e) => {
            const n = nearest(e);
            hover(n && e.clientY - (e.currentTarget as Element).getBoundingClientRect().top < TOP + L.treeH + 4 ? { n, at: { x: e.clientX, y: e.clientY } } : null);
          }}
          onMouseLeave={() => hover(null)}
          onClick={(e) => {
            const n = nearest(e);
            if (n) select(n);
          }}
        >
          <svg width={L.width} height={L.height}>
            <Picture L={L} />
          </svg>
          <svg class="overlay" width={L.width} height={L.height}>
            <Overlay L={L} selected={selected} hovered={hovered?.n ?? null} />
          </svg>
        </div>
      </div>
      {hovered && hovered.n.t < run.steps.length ? <Tip L={L} n={hovered.n} at={hovered.at} /> : null}
      <footer>
        <ul class="legend" aria-label="Time of the whole run, by phase">
          <li class="dim">Whole run:</li>
          {total.prefill ? <li title="the prompt is read">prefill <span class="dim">{seconds(total.prefill)}</span></li> : null}
          {phases.map((p) => (
            <li key={p} title={DOES[p]}><i class={`mark phase ${p}`} />{p} <span class="dim">{seconds(spent(p))}</span></li>
          ))}
        </ul>
        <p id="genealogy-keys" class="keys">
          <kbd>←</kbd><kbd>→</kbd> along a particle <kbd>↑</kbd><kbd>↓</kbd> at a step <kbd>a</kbd> answer <kbd>w</kbd> heaviest <kbd>?</kbd> all keys
        </p>
      </footer>
    </section>
  );
}
