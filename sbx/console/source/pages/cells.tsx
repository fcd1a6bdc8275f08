// Cells of code, as in a notebook. Their runs are in the history of the sandbox, so a reload keeps them.
import { useSignal } from "@preact/signals";
import type { JSX } from "preact";
import { useEffect, useRef } from "preact/hooks";
import { at, call, get, request } from "../api/calls";
import { t } from "../i18n";
import { follow } from "../live/socket";
import { Action, Field, Loaded, safe, useLoaded } from "../parts/common";
import { Output, Outputs } from "../parts/output";
import type { Bundle } from "../types/agent";

interface Cell {
  key: number;
  code: string;
}

const KEPT = 10; // cells of the history that are shown

export function Cells({ id }: { id: string }): JSX.Element {
  const context = useSignal("default");
  const cells = useSignal<Cell[]>([]);
  const next = useRef(1);
  const base = ["v1", "sandboxes", id];
  const started = useLoaded<string[]>(async () => {
    const { entries } = await get<{ entries: { code: string; exec_type: string }[] }>(at([...base, "history"], { exec_type: "python", limit: KEPT, peek: true }));
    return entries.map((entry) => entry.code).reverse();
  }, [id]);
  const contexts = useLoaded<string[]>(async () => {
    try {
      const { items } = await get<{ items: { name: string }[] }>(at([...base, "conversations", "default", "contexts"], { peek: true }));
      return items.map((each) => each.name);
    } catch {
      return ["default"]; // the conversation has not begun
    }
  }, [id]);
  useEffect(() => {
    if (started.value && cells.value.length === 0) {
      cells.value = [...started.value, ""].map((code) => ({ key: next.current++, code }));
    }
  }, [started.value]);
  const add = (): void => {
    cells.value = [...cells.value, { key: next.current++, code: "" }];
  };
  const run = useRef(new Map<number, () => Promise<void>>());
  return (
    <Loaded of={started}>
      {() => (
        <>
          <div class="buttons">
            <Field label={t("cells.context")}>
              <select value={context.value} onChange={(event) => (context.value = event.currentTarget.value)}>
                {(contexts.value ?? ["default"]).map((name) => (
                  <option key={name} value={name}>
                    {safe(name)}
                  </option>
                ))}
              </select>
            </Field>
            <Action
              act={async () => {
                for (const cell of cells.value) await run.current.get(cell.key)?.();
              }}
            >
              {t("cells.run_all")}
            </Action>
            <Action act={() => call("POST", at([...base, "conversations", "default", "contexts", context.value, "interrupt"]))}>{t("cells.interrupt")}</Action>
            <Action act={() => call("POST", at([...base, "conversations", "default", "contexts", context.value, "restart"]))}>{t("cells.restart")}</Action>
          </div>
          {cells.value.map((cell, place) => (
            <CellView
              key={cell.key}
              cell={cell}
              number={place + 1}
              base={base}
              context={context.value}
              change={(code) => (cells.value = cells.value.map((each) => (each.key === cell.key ? { ...each, code } : each)))}
              offer={(act) => run.current.set(cell.key, act)}
            />
          ))}
          <button type="button" onClick={add}>
            {t("cells.add")}
          </button>
        </>
      )}
    </Loaded>
  );
}

interface Shown {
  text: string;
  outputs: Bundle[];
  asks: { prompt: string; password: boolean } | null;
  runId: string | null;
  running: boolean;
}

interface CellProps {
  cell: Cell;
  number: number;
  base: string[];
  context: string;
  change: (code: string) => void;
  offer: (act: () => Promise<void>) => void;
}

function CellView({ cell, number, base, context, change, offer }: CellProps): JSX.Element {
  const shown = useSignal<Shown | null>(null);
  const answer = useSignal("");
  const area = useRef<HTMLTextAreaElement>(null);
  const leave = useRef<(() => void) | null>(null);
  useEffect(() => () => leave.current?.(), []);
  const receive = (event: Record<string, unknown>): void => {
    const now = shown.value!;
    const type = event.type as string;
    if (type === "stdout" || type === "stderr") shown.value = { ...now, text: now.text + String(event.text) };
    else if (type === "display" || type === "result") shown.value = { ...now, outputs: [...now.outputs, event.data as Bundle] };
    else if (type === "clear") shown.value = { ...now, text: "", outputs: [] };
    else if (type === "input_request") shown.value = { ...now, asks: { prompt: String(event.prompt), password: Boolean(event.password) } };
    else if (type === "error") {
      const error = (event.error ?? event) as { traceback_ansi?: string; traceback?: string; name?: string; value?: string };
      shown.value = { ...now, text: `${now.text}${error.traceback_ansi ?? error.traceback ?? `${error.name}: ${error.value}`}\n` };
    }
  };
  /** Begin the run, learn its id from its first event, and follow it with all others. */
  const run = async (): Promise<void> => {
    if (!cell.code.trim()) return;
    leave.current?.();
    shown.value = { text: "", outputs: [], asks: null, runId: null, running: true };
    try {
      const body = { code: cell.code, context, interactive: true, stream: true };
      const reply = await request("POST", at([...base, "conversations", "default", "runs"]), body);
      const runId = await firstRunId(reply);
      shown.value = { ...shown.value, runId };
      await new Promise<void>((resolve) => {
        let last = 0;
        const end = (): void => {
          leave.current?.();
          leave.current = null;
          if (shown.value) shown.value = { ...shown.value, running: false, asks: null };
          resolve();
        };
        leave.current = follow({
          request: () => ({ topic: "run", sandbox_id: base[2]!, run_id: runId, after: last }),
          onEvent: (event, seq) => {
            last = seq;
            receive(event);
          },
          onEnd: end,
          onFailure: end,
        });
      });
    } catch (error) {
      shown.value = null;
      throw error;
    }
  };
  useEffect(() => offer(run));
  const complete = async (): Promise<void> => {
    const box = area.current!;
    const question = { code: box.value, cursor: box.selectionStart };
    const found = await call<{ matches: string[]; start: number; end: number }>("POST", at([...base, "conversations", "default", "contexts", context, "complete"]), question);
    if (found.matches.length === 1) {
      change(box.value.slice(0, found.start) + found.matches[0]! + box.value.slice(found.end));
    }
  };
  const onKey = (event: KeyboardEvent): void => {
    if (event.key === "Enter" && event.shiftKey && !event.isComposing) {
      event.preventDefault();
      void run().catch(() => undefined);
    } else if (event.key === "Escape") {
      area.current?.blur();
    } else if (event.key === " " && event.ctrlKey) {
      event.preventDefault();
      void complete().catch(() => undefined);
    }
  };
  const state = shown.value;
  return (
    <section class="cell" role="group" aria-label={t("cells.cell", { number })}>
      <textarea ref={area} class="code" spellcheck={false} aria-label={t("cells.code")} title={t("cells.keys")} rows={Math.min(20, Math.max(2, cell.code.split("\n").length))} value={cell.code} onInput={(event) => change(event.currentTarget.value)} onKeyDown={onKey} />
      <div class="buttons">
        <Action kind="primary" act={run} disabled={state?.running ?? false}>
          {t("cells.run")}
        </Action>
      </div>
      {state && (
        <section role="region" aria-label={t("tool.output")} aria-busy={state.running}>
          {state.text && <Output text={state.text} />}
          <Outputs bundles={state.outputs} place={null} />
          {state.asks && (
            <form
              class="buttons"
              onSubmit={(event) => {
                event.preventDefault();
                const text = answer.value;
                answer.value = "";
                shown.value = { ...state, asks: null };
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
