// Cells of code, as in a notebook. Their runs are in the history of the sandbox, so a reload keeps them.
import { useSignal } from "@preact/signals";
import type { JSX } from "preact";
import { useEffect, useRef } from "preact/hooks";
import { ApiError, at, call, get, request } from "../api/calls";
import { t } from "../i18n";
import { CellView } from "../parts/cell";
import { Action, Dialog, Field, Loaded, safe, useLoaded } from "../parts/common";
import { NOTHING, notebook, traceback, type Cell, type Shown } from "../parts/notebook";
import type { Bundle } from "../types/agent";

const KEPT = 10; // cells of the history that are shown

interface Recorded {
  stdout: string;
  stderr: string;
  outputs: Bundle[];
  error: { name: string; value: string; traceback?: string; traceback_ansi?: string } | null;
}

/** What the cell of an earlier run shows. */
async function earlier(base: string[], runId: string): Promise<Shown> {
  try {
    const run = await get<Recorded>(at([...base, "runs", runId], { peek: true }));
    const text = run.stdout + run.stderr + (run.error ? `${traceback(run.error)}\n` : "");
    return { ...NOTHING, runId, text, outputs: run.outputs, ids: run.outputs.map(() => null) };
  } catch (error) {
    if (error instanceof ApiError && error.code === "run_not_kept") return { ...NOTHING, runId, running: true };
    throw error;
  }
}

async function history(base: string[]): Promise<Omit<Cell, "key">[]> {
  const { entries } = await get<{ entries: { id: string; code: string }[] }>(at([...base, "history"], { conversation: "default", exec_type: "python", running: true, limit: KEPT, peek: true }));
  const cells = await Promise.all(entries.map(async ({ id, code }) => ({ code, shown: await earlier(base, id.replace(/^exec-/, "run-")) })));
  return cells.reverse();
}

export function Cells({ id }: { id: string }): JSX.Element {
  const context = useSignal("default");
  const cells = useSignal<Cell[]>([]);
  const dialog = useSignal<"context" | "notebook" | null>(null);
  const next = useRef(1);
  const base = ["v1", "sandboxes", id];
  const started = useLoaded(() => history(base), [id]);
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
      cells.value = [...started.value, { code: "", shown: null }].map((cell) => ({ ...cell, key: next.current++ }));
    }
  }, [started.value]);
  const add = (): void => {
    cells.value = [...cells.value, { key: next.current++, code: "", shown: null }];
  };
  const run = useRef(new Map<number, () => Promise<void>>());
  const kernel = [...base, "conversations", "default", "contexts"];
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
            <button type="button" onClick={() => (dialog.value = "context")}>
              {t("cells.new_context")}
            </button>
            <Action
              act={async () => {
                for (const cell of cells.value) await run.current.get(cell.key)?.();
              }}
            >
              {t("cells.run_all")}
            </Action>
            <Action act={() => call("POST", at([...kernel, context.value, "interrupt"]))}>{t("cells.interrupt")}</Action>
            <Action act={() => call("POST", at([...kernel, context.value, "restart"]))}>{t("cells.restart")}</Action>
            <button type="button" onClick={() => (dialog.value = "notebook")}>
              {t("cells.save")}
            </button>
          </div>
          {cells.value.map((cell, place) => (
            <CellView
              key={cell.key}
              cell={cell}
              number={place + 1}
              base={base}
              context={context.value}
              change={(changed) => (cells.value = cells.value.map((each) => (each.key === cell.key ? { ...each, ...changed } : each)))}
              offer={(act) => run.current.set(cell.key, act)}
            />
          ))}
          <button type="button" onClick={add}>
            {t("cells.add")}
          </button>
          {dialog.value === "context" && (
            <NameDialog
              title={t("cells.new_context")}
              label={t("cells.context_name")}
              text=""
              action={t("action.create")}
              act={async (name) => {
                await call("POST", at(kernel), { name });
                contexts.reload();
                context.value = name;
              }}
              onClose={() => (dialog.value = null)}
            />
          )}
          {dialog.value === "notebook" && (
            <NameDialog
              title={t("cells.save")}
              label={t("cells.file")}
              text="cells.ipynb"
              action={t("action.save")}
              act={async (path) => {
                const file = new Blob([notebook(cells.value)], { type: "application/octet-stream" });
                await request("PUT", at([...base, "conversations", "default", "files"], { path }), file);
              }}
              onClose={() => (dialog.value = null)}
            />
          )}
        </>
      )}
    </Loaded>
  );
}

interface NameDialogProps {
  title: string;
  label: string;
  text: string;
  action: string;
  act: (name: string) => Promise<unknown>;
  onClose: () => void;
}

function NameDialog({ title, label, text, action, act, onClose }: NameDialogProps): JSX.Element {
  const name = useSignal(text);
  return (
    <Dialog title={title} onClose={onClose}>
      <Field label={label}>
        <input type="text" value={name.value} onInput={(event) => (name.value = event.currentTarget.value)} />
      </Field>
      <div class="buttons">
        <Action kind="primary" disabled={!name.value.trim()} act={async () => (await act(name.value), onClose())}>
          {action}
        </Action>
        <button type="button" onClick={onClose}>
          {t("action.cancel")}
        </button>
      </div>
    </Dialog>
  );
}
