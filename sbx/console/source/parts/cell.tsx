// One cell: its editor, its run and what the run printed.
import { useSignal } from "@preact/signals";
import type { JSX } from "preact";
import { useEffect, useRef } from "preact/hooks";
import { at, call, request } from "../api/calls";
import { t } from "../i18n";
import { follow } from "../live/socket";
import { built } from "../shell/build";
import type { Editor } from "./codemirror";
import { Action, safe } from "./common";
import { after, NOTHING, type Cell, type Shown } from "./notebook";
import { Output, Outputs } from "./output";

interface CellProps {
  cell: Cell;
  number: number;
  base: string[];
  context: string;
  change: (changed: Partial<Cell>) => void;
  /** Give the caller the function that runs this cell. */
  offer: (run: () => Promise<void>) => void;
}

export function CellView({ cell, number, base, context, change, offer }: CellProps): JSX.Element {
  const answer = useSignal("");
  const leave = useRef<(() => void) | null>(null);
  const now = useRef(cell.shown ?? NOTHING);
  const code = useRef(cell.code); // the typed text, also before the next frame
  const show = (shown: Shown): void => change({ shown: (now.current = shown) });
  const watch = (runId: string): Promise<void> =>
    new Promise((resolve) => {
      let last = 0;
      const end = (): void => {
        leave.current?.();
        leave.current = null;
        show({ ...now.current, running: false, asks: null });
        resolve();
      };
      leave.current = follow({
        request: () => ({ topic: "run", sandbox_id: base[2]!, run_id: runId, after: last }),
        onEvent: (event, seq) => {
          last = seq;
          show(after(now.current, event));
        },
        onEnd: end,
        onFailure: end,
      });
    });
  /** Begin the run, learn its id from its first event, and follow it with all others. */
  const run = async (): Promise<void> => {
    if (!code.current.trim()) return;
    leave.current?.();
    show({ ...NOTHING, running: true });
    try {
      const body = { code: code.current, context, interactive: true, stream: true };
      const reply = await request("POST", at([...base, "conversations", "default", "runs"]), body);
      const runId = await firstRunId(reply);
      show({ ...now.current, runId });
      await watch(runId);
    } catch (error) {
      change({ shown: null });
      throw error;
    }
  };
  useEffect(() => {
    if (cell.shown?.running && cell.shown.runId) void watch(cell.shown.runId); // it began before a reload
    return () => leave.current?.();
  }, []);
  useEffect(() => offer(run));
  const state = cell.shown;
  return (
    <section class="cell" role="group" aria-label={t("cells.cell", { number })}>
      <Code code={cell.code} change={(typed) => change({ code: (code.current = typed) })} run={() => void run().catch(() => undefined)} context={[...base, "conversations", "default", "contexts", context]} />
      <div class="buttons">
        <Action kind="primary" act={run} disabled={state?.running ?? false}>
          {t("cells.run")}
        </Action>
      </div>
      {state && (
        <section role="region" aria-label={t("tool.output")} aria-busy={state.running}>
          {state.text && <Output text={state.text} live={state.running} />}
          <Outputs bundles={state.outputs} place={null} />
          {state.asks && (
            <form
              class="buttons"
              onSubmit={(event) => {
                event.preventDefault();
                const text = answer.value;
                answer.value = "";
                show({ ...state, asks: null });
                void call("POST", at([...base, "runs", state.runId!, "input"]), { text });
              }}
            >
              <input {...(state.asks.password ? { type: "password" as const } : { type: "text" as const })} aria-label={t("cells.input", { prompt: safe(state.asks.prompt) })} value={answer.value} onInput={(event) => (answer.value = event.currentTarget.value)} />
              <button type="submit">{t("cells.send_input")}</button>
            </form>
          )}
        </section>
      )}
    </section>
  );
}

interface CodeProps {
  code: string;
  change: (code: string) => void;
  run: () => void;
  context: string[];
}

/** The editor; a text area until it is loaded. */
function Code({ code, change, run, context }: CodeProps): JSX.Element {
  const place = useRef<HTMLDivElement>(null);
  const editor = useRef<Editor | null>(null);
  const area = useRef<HTMLTextAreaElement>(null);
  const loaded = useSignal(false);
  const latest = useRef({ code, change, run, context });
  latest.current = { code, change, run, context };
  useEffect(() => {
    let over = false;
    const begin = ({ edit }: typeof import("./codemirror")): void => {
      if (over || !place.current) return;
      const focused = place.current.parentElement?.contains(document.activeElement);
      area.current!.hidden = true; // it goes with the next frame
      editor.current = edit(place.current, {
        text: area.current!.value, // also the text of the last keys, which no frame shows yet
        label: t("cells.code"),
        onChange: (text) => latest.current.change(text),
        onRun: () => latest.current.run(),
        complete: (text, at) => completions(latest.current.context, text, at),
      });
      loaded.value = true;
      if (focused) editor.current.focus();
    };
    built<typeof import("./codemirror")>("editor").then(begin, () => undefined); // the text area stays
    return () => {
      over = true;
      editor.current?.end();
    };
  }, []);
  const onKey = (event: KeyboardEvent): void => {
    if (event.key === "Enter" && event.shiftKey && !event.isComposing) {
      event.preventDefault();
      run();
    } else if (event.key === "Escape") {
      (event.currentTarget as HTMLElement).blur();
    }
  };
  return (
    <div title={t("cells.keys")}>
      <div ref={place} />
      {!loaded.value && <textarea ref={area} class="code" spellcheck={false} aria-label={t("cells.code")} rows={2} value={code} onInput={(event) => change(event.currentTarget.value)} onKeyDown={onKey} />}
    </div>
  );
}

/** Ask the kernel. It counts characters, and JavaScript UTF-16 units. */
async function completions(context: string[], text: string, place: number): Promise<{ matches: string[]; start: number; end: number }> {
  const characters = [...text];
  const found = await call<{ matches: string[]; start: number; end: number }>("POST", at([...context, "complete"]), { code: text, cursor: [...text.slice(0, place)].length });
  const unit = (count: number): number => characters.slice(0, count).join("").length;
  return { matches: found.matches, start: unit(found.start), end: unit(found.end) };
}

/** The id of a run, from the first event of its reply. The run continues without its reader. */
async function firstRunId(reply: Response): Promise<string> {
  const reader = reply.body!.getReader();
  const decoder = new TextDecoder();
  let text = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      text += decoder.decode(value, { stream: true });
      const found = /"run_id": ?"([^"]+)"/.exec(text);
      if (found) return found[1]!;
    }
  } finally {
    void reader.cancel();
  }
  throw new Error("the reply has no run");
}
