// One particle at one step: its text, token by token, and what went on along it.

import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { HELP } from "./glossary";
import { count, Node, num, percent, Run, Token, visible } from "./model";

type Colour = "difference" | "surprise" | "choice";

const MOST = 3; // nats at which a colour is full

const difference = (t: Token) => (t.logP === -Infinity ? -Infinity : t.logP - t.logQ);

/** From −1 to 1: how far, and to which side, a token is coloured. */
function shade(token: Token, by: Colour): number {
  if (by === "difference") return Math.max(-1, Math.min(1, difference(token) / MOST));
  if (by === "surprise") return Math.max(-1, token.logP / (2 * MOST));
  if (token.allowed === null) return 0;
  return token.allowed === 1 ? -1 : -Math.max(0, 0.8 - Math.log10(token.allowed) / 5);
}

const style = (value: number) => ({ "--side": value < 0 ? "var(--minus)" : "var(--plus)", "--much": `${(Math.abs(value) * 62).toFixed(0)}%` });

const LEGENDS: Record<Colour, { title: string; left: string; right: string | null; help: string }> = {
  difference: {
    title: "log p − log q̃",
    left: `−${MOST} nats or less`,
    right: `${MOST} nats or more`,
    help: HELP["log p − log q̃"],
  },
  surprise: { title: "log p", left: `−${2 * MOST} nats or less`, right: null, help: `How unlikely each token is under the target: at −${2 * MOST} nats it has a probability of 0.2 %, at 0 of 100 %.` },
  choice: { title: "tokens allowed", left: "1: forced", right: null, help: "How many tokens the constraint allows where each was drawn: the deeper, the fewer." },
};

function describe(token: Token, n: number): [string, string][] {
  const bytes = [...token.bytes].map((b) => b.toString(16).padStart(2, "0")).join(" ");
  return [
    ["token", `${n}, id ${token.id}${token.piece ? "" : token.bytes.length ? `, bytes ${bytes}` : token.end ? ", end of text" : ", control token"}`],
    ["log p", `${num(token.logP, 3)} nats (${percent(Math.exp(token.logP))})`],
    ["log q̃", `${num(token.logQ, 3)} nats (${percent(Math.exp(token.logQ))})`],
    ["log p − log q̃", `${num(difference(token), 3)} nats`],
    ["drawn from", `the ${token.bonus ? "target" : "draft"}${token.allowed === null ? "" : ", among what is allowed"}`],
    ...(token.allowed === null
      ? []
      : ([
          ["allowed here", token.allowed === 1 ? "1 token: forced" : count(token.allowed, "token")],
          ["text might end here", token.accepting ? "yes" : "no"],
        ] as [string, string][])),
  ];
}

function TokenTip({ token, n, anchor, step }: { token: Token; n: number; anchor: DOMRect; step: number }) {
  const flip = anchor.left > window.innerWidth - 300;
  const up = anchor.bottom > window.innerHeight - 220;
  return (
    <div
      class="tip"
      role="tooltip"
      id="token-tip"
      style={{
        left: `${flip ? anchor.right : anchor.left}px`,
        top: `${up ? anchor.top - 8 : anchor.bottom + 8}px`,
        transform: `translate(${flip ? "-100%" : "0"}, ${up ? "-100%" : "0"})`,
      }}
    >
      <b>{token.piece ? <code>{visible(token.piece)}</code> : token.end ? "end of text" : "part of a character, or no text"}</b>
      <dl>
        {describe(token, n).map(([name, value]) => [<dt key={name}>{name}</dt>, <dd>{value}</dd>])}
        <dt>step</dt>
        <dd>{step}</dd>
      </dl>
    </div>
  );
}

interface Along {
  tokens: Token[];
  run: Run;
  lineage: Node[];
  active: number | null;
  activate: (n: number | null) => void;
}

/** Small charts over the tokens of the text. */
function Tracks({ tokens, run, lineage, active, activate }: Along) {
  const frame = useRef<HTMLDivElement>(null);
  const [width, setWidth] = useState(600);
  useEffect(() => {
    const observer = new ResizeObserver(() => setWidth(Math.max(240, frame.current?.clientWidth ?? 0)));
    observer.observe(frame.current!);
    return () => observer.disconnect();
  }, []);
  const gutter = 132;
  const dx = Math.min(14, (width - gutter - 8) / Math.max(tokens.length, 1));
  const x = (i: number) => gutter + i * dx;
  const bar = Math.max(0.7, dx - (dx > 3 ? 1 : 0));
  const rows: { title: string; help?: string; height: number; draw: (y: number, h: number) => any }[] = [];
  rows.push({
    title: "log p − log q̃",
    help: HELP["log p − log q̃"],
    height: 46,
    draw: (y, h) => (
      <>
        <text x={gutter - 10} y={y + 25} text-anchor="end" class="small">{tokens.some((t) => Math.abs(difference(t)) > 1e-6) ? `−${MOST} to ${MOST} nats` : "0 for every token"}</text>
        <line class="base" x1={gutter} x2={x(tokens.length)} y1={y + h / 2} y2={y + h / 2} />
        {(["plus", "minus"] as const).map((side) => (
          <path
            key={side}
            class={`bar ${side}`}
            d={tokens
              .map((t, i) => {
                const v = Math.max(-MOST, Math.min(MOST, difference(t)));
                if (v > 0 !== (side === "plus") || Math.abs(v) < 1e-4) return "";
                return `M${x(i).toFixed(1)} ${(y + h / 2).toFixed(1)}h${bar.toFixed(2)}v${((-v / MOST) * (h / 2)).toFixed(1)}h${(-bar).toFixed(2)}z`;
              })
              .join("")}
          />
        ))}
      </>
    ),
  });
  if (tokens.some((t) => t.allowed !== null)) {
    const counts = tokens.map((t) => t.allowed).filter((n): n is number => n !== null);
    const [fewest, many] = [Math.min(...counts), Math.max(...counts)];
    const most = Math.log10(Math.max(10, many));
    rows.push({
      title: "tokens allowed",
      help: `${HELP["tokens allowed"]} The height is logarithmic.`,
      height: 40,
      draw: (y, h) => (
        <>
          <text x={gutter - 10} y={y + 24} text-anchor="end" class="small">{fewest === many ? count(many, "token") : `${fewest.toLocaleString("en")} to ${many.toLocaleString("en")}`}</text>
          <line class="base" x1={gutter} x2={x(tokens.length)} y1={y + h} y2={y + h} />
          <path
            class="bar allowed"
            d={tokens
              .map((t, i) => {
                const v = 2 + (Math.log10(Math.max(t.allowed ?? 1, 1)) / most) * (h - 2);
                return `M${x(i).toFixed(1)} ${(y + h).toFixed(1)}h${bar.toFixed(2)}v${(-v).toFixed(1)}h${(-bar).toFixed(2)}z`;
              })
              .join("")}
          />
          <path class="bar may-end" d={tokens.map((t, i) => (t.accepting ? `M${x(i).toFixed(1)} ${y + h + 2}h${bar.toFixed(2)}v3h${(-bar).toFixed(2)}z` : "")).join("")} />
          <text x={gutter - 10} y={y + h + 6} text-anchor="end" class="small">{tokens.some((t) => t.accepting) ? "may end ▬" : ""}</text>
        </>
      ),
    });
  }
  const upTo = lineage.map((n) => tokens.filter((t) => t.t <= n.t).length);
  const curve = (values: (number | null)[], y: number, h: number, cls: string, told: (x: number) => string = num) => {
    const known = values.filter((v): v is number => v !== null);
    if (!known.length) return <text x={gutter} y={y + 11} class="small">none: it was not asked before the particle died or ended</text>;
    let [low, high] = [Math.min(...known), Math.max(...known)];
    if (high - low < 1e-9) [low, high] = [low - 1, high + 1];
    let d = "";
    values.forEach((v, i) => {
      if (v === null) return;
      const at = (y + h - ((v - low) / (high - low)) * h).toFixed(1);
      d += `${d ? "L" : "M"}${x(upTo[i - 1] ?? 0).toFixed(1)} ${at}L${x(upTo[i]).toFixed(1)} ${at}`;
    });
    return (
      <>
        <path class={`curve ${cls}`} d={d} />
        <text x={gutter - 10} y={y + h} text-anchor="end" class="small">{told(known[0])} → {told(known[known.length - 1])}</text>
      </>
    );
  };
  const names = Object.keys(run.steps[0]?.rewards ?? {});
  for (const name of names) {
    rows.push({ title: `reward ${name}`, help: `R of the text so far, by the reward ${name}`, height: 30, draw: (y, h) => curve(lineage.map((n) => run.steps[n.t].rewards[name]?.[n.s] ?? null), y, h, "reward") });
  }
  for (const name of Object.keys(run.steps[0]?.log_potentials ?? {})) {
    const scores = lineage.map((n) => run.steps[n.t].log_potentials[name]?.[n.s] ?? null);
    // What is always 0 only forbids, and has not.
    if (!names.includes(name) && scores.some((x) => x !== 0)) rows.push({ title: name, help: `log score of ${name}, nats: added to the log-weight`, height: 30, draw: (y, h) => curve(scores, y, h, "score") });
  }
  rows.push({ title: "share of the weight", help: HELP.weight, height: 30, draw: (y, h) => curve(lineage.map((n) => run.weights[n.t][n.s]), y, h, "weight", percent) });
  const tops: number[] = [];
  let y = 4;
  for (const row of rows) {
    tops.push(y);
    y += row.height + 16;
  }
  const pick = (event: MouseEvent) => {
    const i = Math.floor((event.clientX - (event.currentTarget as Element).getBoundingClientRect().left - gutter) / dx);
    return i >= 0 && i < tokens.length ? i : null;
  };
  return (
    <div class="tracks" ref={frame}>
      <svg width={width} height={y} role="img" aria-label="Along the text: weight of each token, grammar state, rewards" onMouseMove={(e) => activate(pick(e))} onMouseLeave={() => activate(null)}>
        {active !== null ? <rect class="now" x={x(active) - 0.5} width={Math.max(dx, 2)} y={0} height={y} /> : null}
        {rows.map((row, i) => (
          <g key={row.title}>
            <text x={gutter - 10} y={tops[i] + 11} text-anchor="end"><title>{row.help ?? row.title}</title>{row.title.length > 20 ? `${row.title.slice(0, 19)}…` : row.title}</text>
            {row.draw(tops[i], row.height)}
          </g>
        ))}
      </svg>
    </div>
  );
}

export function ParticlePanel({ run, node, select }: { run: Run; node: Node; select: (n: Node) => void }) {
  const [chosen, setBy] = useState<Colour | null>(null);
  const [active, activate] = useState<number | null>(null);
  const [anchor, setAnchor] = useState<DOMRect | null>(null);
  const lineage = useMemo(() => run.lineage(node), [run, node.t, node.s]);
  const tokens = useMemo(() => run.tokens(node), [run, node.t, node.s]);
  useEffect(() => (activate(null), setAnchor(null)), [run, node.t, node.s]);
  const step = run.steps[node.t];
  // Without a draft and a constraint, no token weighs anything.
  const by = chosen ?? (tokens.some((t) => Math.abs(difference(t)) > 1e-6) ? "difference" : "surprise");
  const legend = LEGENDS[by];
  const point = (i: number | null, element?: Element) => {
    activate(i);
    setAnchor(element ? element.getBoundingClientRect() : null);
  };
  const slotAt = new Map(lineage.map((n) => [n.t, n.s]));
  const sums = tokens.reduce((sum, t) => ({ p: sum.p + t.logP, q: sum.q + t.logQ }), { p: 0, q: 0 });
  const constrained = tokens.some((t) => t.allowed !== null);
  return (
    <section class="card particle" aria-labelledby="particle-title">
      <header>
        <h2 id="particle-title">
          Particle {node.s} at step {step.index}
        </h2>
        <label>
          colour
          <select value={by} onChange={(e) => setBy((e.target as HTMLSelectElement).value as Colour)}>
            <option value="difference">log p − log q̃</option>
            <option value="surprise">log p</option>
            {constrained ? <option value="choice">tokens allowed</option> : null}
          </select>
        </label>
      </header>
      <p class="fate" data-testid="fate">
        <b>{percent(run.weights[node.t][node.s])}</b> of the weight · {run.fate(node)}
        <span class="dim">
          {" "}· <span title={HELP["log p"]}>log p {num(sums.p)} nats</span> · <span title={HELP["log q̃"]}>log q̃ {num(sums.q)} nats</span> · {count(tokens.length, "token")}
        </span>
      </p>
      <div class="scale" aria-label={`Colours: ${legend.title}, from ${legend.left} to ${legend.right ?? "0"}`}>
        <span>{legend.left}</span>
        <i class={legend.right ? "both" : "one"} />
        <span>{legend.right ?? (by === "choice" ? "many" : "0 nats")}</span>
        <span class="dim">{legend.help}</span>
      </div>
      <div class="text" data-testid="text" onMouseLeave={() => point(null)}>
        {tokens.map((token, i) => (
          <span
            key={i}
            role="button"
            class={`token${token.t === node.t ? " new" : ""}${active === i ? " active" : ""}${token.piece && token.piece.trim() ? "" : " blank"}`}
            style={style(shade(token, by))}
            aria-describedby={active === i && anchor ? "token-tip" : undefined}
            tabIndex={i === (active ?? 0) ? 0 : -1}
            onMouseEnter={(e) => point(i, e.currentTarget)}
            onFocus={(e) => point(i, e.currentTarget)}
            onBlur={() => point(null)}
            onKeyDown={(e) => {
              const { nextElementSibling: next, previousElementSibling: before } = e.currentTarget;
              if (e.key === "ArrowRight" || e.key === "ArrowLeft") {
                e.preventDefault(); // also at the ends, from where it would walk to another step
                ((e.key === "ArrowRight" ? next : before) as HTMLElement | null)?.focus();
              } else if (e.key === "Enter" || e.key === " ") {
                e.preventDefault();
                e.currentTarget.click();
              }
            }}
            onClick={() => slotAt.has(token.t) && select({ t: token.t, s: slotAt.get(token.t)! })}
          >
            {token.end ? <span class="end">end</span> : token.piece ? visible(token.piece) : token.bytes.length ? "·" : `⟨${token.id}⟩`}
          </span>
        ))}
        {tokens.length ? null : <span class="dim">no tokens yet</span>}
      </div>
      {active !== null && anchor && tokens[active] ? <TokenTip token={tokens[active]} n={active + 1} anchor={anchor} step={run.steps[tokens[active].t].index} /> : null}
      {tokens.length ? <Tracks tokens={tokens} run={run} lineage={lineage} active={active} activate={(i) => point(i)} /> : null}
    </section>
  );
}
