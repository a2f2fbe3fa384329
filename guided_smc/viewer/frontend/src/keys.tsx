// Keys that move through a run, wherever the focus is.

import { useEffect, useRef } from "preact/hooks";
import { Node, Run } from "./model";

const KEYS: [string[], string][] = [
  [["←", "→"], "back and forth along the particle; forth is its heaviest heir"],
  [["↑", "↓"], "the particle above or below at the same step"],
  [["Home", "End"], "where the particle began, and where it ended"],
  [["Page ↑", "Page ↓"], "ten steps back or forth, in the picture and in the list of particles; elsewhere they scroll"],
  [["a"], "the answer"],
  [["w"], "the heaviest particle of the step"],
  [["?"], "this list"],
];

/** Where a key leads from a particle; null if nowhere. */
function target(run: Run, n: Node, key: string): Node | null {
  const last = run.steps.length - 1;
  const at = (t: number, s: number): Node => ({ t, s: Math.max(0, Math.min(s, run.steps[t].log_weights.length - 1)) });
  const back = (k: number) => {
    let m = n;
    for (let i = 0; i < k; i++) m = run.parent(m) ?? (m.t ? at(m.t - 1, m.s) : m);
    return m;
  };
  const forth = (k: number) => {
    let m = n;
    for (let i = 0; i < k; i++) m = run.heirs(m)[0] ?? (m.t < last ? at(m.t + 1, m.s) : m);
    return m;
  };
  const to: Record<string, () => Node | null> = {
    ArrowLeft: () => back(1),
    ArrowRight: () => forth(1),
    ArrowUp: () => at(n.t, n.s - 1),
    ArrowDown: () => at(n.t, n.s + 1),
    PageUp: () => back(10),
    PageDown: () => forth(10),
    Home: () => back(n.t),
    End: () => forth(last - n.t),
    a: () => run.answer,
    w: () => at(n.t, run.weights[n.t].indexOf(Math.max(...run.weights[n.t]))),
  };
  return to[key]?.() ?? null;
}

/** Whether a key means something else where it was pressed. */
function taken(event: KeyboardEvent): boolean {
  if (event.defaultPrevented || event.isComposing || event.ctrlKey || event.metaKey || event.altKey) return true;
  if (document.querySelector("dialog[open]")) return true;
  const from = event.target;
  return from instanceof HTMLElement && (from.isContentEditable || from.matches("input, textarea, select"));
}

/** Whether a key scrolls here: text that is longer than its box, and a page by whole screens. */
function scrolls({ key, target: from }: KeyboardEvent): boolean {
  if (!(from instanceof HTMLElement) || from.closest("[data-keys=all]")) return false;
  if (key === "PageUp" || key === "PageDown") return true;
  return key.length > 1 && from.matches("pre") && from.scrollHeight > from.clientHeight;
}

/** Calls back for each key that nothing else on the page has a use for. */
function useKeys(act: (event: KeyboardEvent) => boolean) {
  const latest = useRef(act);
  latest.current = act;
  useEffect(() => {
    const listen = (event: KeyboardEvent) => {
      if (!taken(event) && latest.current(event)) event.preventDefault();
    };
    document.addEventListener("keydown", listen);
    return () => document.removeEventListener("keydown", listen);
  }, []);
}

/** Moves from particle to particle. */
export function useWalk(run: Run, node: Node | null, select: (n: Node) => void) {
  useKeys((event) => {
    if (!node || event.shiftKey || scrolls(event)) return false;
    const to = target(run, node, event.key.length === 1 ? event.key.toLowerCase() : event.key);
    if (to) select(to);
    return to !== null;
  });
}

/** The button and the list of keys, which `?` opens too. */
export function Keys() {
  const list = useRef<HTMLDialogElement>(null);
  const open = () => list.current!.showModal();
  useKeys((event) => event.key === "?" && (open(), true));
  return (
    <>
      <button type="button" class="keys-button" onClick={open} title="all keys">
        Keys <kbd>?</kbd>
      </button>
      <dialog ref={list} aria-labelledby="keys-title" onClick={(e) => e.target === list.current && list.current!.close()}>
        <div>
          <h2 id="keys-title">Keys</h2>
          <dl>
            {KEYS.map(([keys, does]) => [<dt key={does}>{keys.map((k) => <kbd key={k}>{k}</kbd>)}</dt>, <dd>{does}</dd>])}
          </dl>
          <p class="dim">
            They work wherever the focus is, but for fields that you type or choose in, and where a list of records has a use for them. <kbd>Tab</kbd> goes from part to part. On a token of
            the text, <kbd>←</kbd> and <kbd>→</kbd> go to its neighbours, and <kbd>Enter</kbd> to the step that drew it.
          </p>
          <button type="button" class="primary" onClick={() => list.current!.close()}>Close</button>
        </div>
      </dialog>
    </>
  );
}
