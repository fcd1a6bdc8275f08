// One sandbox: its usage, cells, terminals, files, history, events, network and walls.
import { useSignal } from "@preact/signals";
import type { JSX } from "preact";
import { useEffect, useRef } from "preact/hooks";
import { all, ApiError, at, call, get } from "../api/calls";
import type { Sandbox, Usage } from "../api/types";
import { duration, errorText, seconds, share, size, t, took, when } from "../i18n";
import { Action, Ask, DataTable, Dialog, Field, Loaded, Name, Tabs, safe, useLoaded, useNow } from "../parts/common";
import { Workspace } from "../parts/files";
import { Output } from "../parts/output";
import { built } from "../shell/build";
import { go } from "../shell/route";
import { me, onNotice } from "../shell/state";
import { Cells } from "./cells";
import { Bar, useUsage } from "./sandboxes";

async function oneSandbox(id: string): Promise<Sandbox | null> {
  try {
    return await get<Sandbox>(at(["v1", "sandboxes", id], { detail: true, peek: true }));
  } catch (error) {
    if (error instanceof ApiError && error.status === 404) return null;
    throw error;
  }
}

export function SandboxPage({ id }: { id: string }): JSX.Element {
  const tab = useSignal("overview");
  const box = useLoaded<Sandbox | null>(() => oneSandbox(id), [id]);
  const kinds = useSignal(0);
  useEffect(
    () =>
      onNotice((notice) => {
        if (notice.type !== "sandbox" || notice.sandbox_id !== id) return;
        kinds.value += 1;
        box.reload();
      }),
    [id],
  );
  const base = ["v1", "sandboxes", id];
  return (
    <div class="page">
      <h1>
        <Name>{id}</Name>
      </h1>
      <Loaded of={box}>
        {(sandbox) =>
          sandbox === null ? (
            <p class="empty">{t("sandboxes.gone")}</p>
          ) : (
            <>
              <Header sandbox={sandbox} base={base} reload={box.reload} />
              <Tabs
                label={t("sandboxes.one")}
                chosen={tab.value}
                choose={(chosen) => (tab.value = chosen)}
                tabs={[
                  { id: "overview", label: t("sandboxes.tabs.overview"), content: () => <Overview sandbox={sandbox} base={base} reload={box.reload} /> },
                  { id: "cells", label: t("sandboxes.tabs.cells"), content: () => <Cells id={id} /> },
                  { id: "terminals", label: t("sandboxes.tabs.terminals"), content: () => <Terminals base={base} /> },
                  { id: "files", label: t("sandboxes.tabs.files"), content: () => <BoxFiles id={id} base={base} /> },
                  { id: "history", label: t("sandboxes.tabs.history"), content: () => <History base={base} /> },
                  { id: "events", label: t("sandboxes.tabs.events"), content: () => <Events base={base} turn={kinds.value} /> },
                  { id: "network", label: t("sandboxes.tabs.network"), content: () => <Network base={base} turn={kinds.value} /> },
                  { id: "walls", label: t("sandboxes.tabs.walls"), content: () => <Walls base={base} /> },
                ]}
              />
            </>
          )
        }
      </Loaded>
    </div>
  );
}

function Header({ sandbox, base, reload }: { sandbox: Sandbox; base: string[]; reload: () => void }): JSX.Element {
  const extending = useSignal(false);
  const deleting = useSignal(false);
  const by = useSignal("3600");
  const now = useNow();
  const then = (work: Promise<unknown>): Promise<void> => work.then(reload);
  return (
    <>
      <p>
        <span class={`state ${sandbox.status}`}>{t(`sandboxes.states.${sandbox.status}`)}</span> · <Name>{sandbox.profile}</Name>
        {sandbox.expires_at !== null && <> · {t("sandboxes.expires_in", { time: duration(seconds(sandbox.expires_at) - now) })}</>}
      </p>
      {sandbox.failure && (
        <div class="failure" role="alert">
          <p>{errorText(sandbox.failure)}</p>
          {sandbox.failure.hint && <p class="hint">{sandbox.failure.hint}</p>}
          {sandbox.failure.code === "honeytoken" && me.value!.operator && (
            <Action act={() => then(call("POST", at(["v1", "admin", "sandboxes", sandbox.id, "unfreeze"])))}>{t("sandboxes.unfreeze")}</Action>
          )}
        </div>
      )}
      <div class="buttons">
        <Action act={() => then(call("POST", at([...base, "stop"])))}>{t("action.stop")}</Action>
        <Action act={() => then(call("POST", at([...base, "resume"])))}>{t("action.resume")}</Action>
        <button type="button" disabled={sandbox.expires_at === null} onClick={() => (extending.value = true)}>
          {t("action.extend")}
        </button>
        <button type="button" class="danger" onClick={() => (deleting.value = true)}>
          {t("action.delete")}
        </button>
      </div>
      {extending.value && (
        <Dialog title={t("action.extend")} onClose={() => (extending.value = false)}>
          <Field label={t("sandboxes.by")}>
            <select value={by.value} onChange={(event) => (by.value = event.currentTarget.value)}>
              {[900, 3600, 14_400, 86_400].map((each) => (
                <option key={each} value={each}>
                  {duration(each)}
                </option>
              ))}
            </select>
          </Field>
          <div class="buttons">
            <Action kind="primary" act={async () => (await then(call("POST", at([...base, "extend_ttl"]), { extend_by: Number(by.value) })), (extending.value = false))}>
              {t("action.extend")}
            </Action>
            <button type="button" onClick={() => (extending.value = false)}>
              {t("action.cancel")}
            </button>
          </div>
        </Dialog>
      )}
      {deleting.value && (
        <Ask
          title={t("sandboxes.delete_title")}
          text={t("sandboxes.delete_ask")}
          action={t("action.delete")}
          act={async () => {
            await call("DELETE", at(base));
            go("/console/sandboxes");
          }}
          onClose={() => (deleting.value = false)}
        />
      )}
    </>
  );
}

const KEPT = 300; // of one every two seconds: ten minutes

function Overview({ sandbox, base, reload }: { sandbox: Sandbox; base: string[]; reload: () => void }): JSX.Element {
  const usage: Usage = useUsage([sandbox.id])[sandbox.id] ?? sandbox.usage ?? {};
  const past = useRef<{ memory: number; cpu: number }[]>([]);
  useEffect(() => {
    if (usage.memory === undefined) return;
    past.current = [...past.current.slice(1 - KEPT), { memory: usage.memory, cpu: usage.cpu_s ?? 0 }];
  }, [usage]);
  const rates = past.current.map((each, place) => (place ? Math.max(0, each.cpu - past.current[place - 1]!.cpu) / 2 : 0));
  return (
    <>
      <dl class="facts">
        <dt>{t("sandboxes.memory")}</dt>
        <dd>
          <Bar label={t("sandboxes.memory")} value={usage.memory} most={usage.memory_max} />
        </dd>
        <dt>{t("sandboxes.disk")}</dt>
        <dd>
          <Bar label={t("sandboxes.disk")} value={usage.disk} most={usage.disk_max} />
        </dd>
        <dt>{t("sandboxes.kernels")}</dt>
        <dd>{sandbox.kernels}</dd>
        <dt>{t("sandboxes.conversations")}</dt>
        <dd>{sandbox.conversations}</dd>
        <dt>{t("sandboxes.created")}</dt>
        <dd>{when(sandbox.created_at)}</dd>
        <dt>{t("sandboxes.owner")}</dt>
        <dd>
          <Name>{sandbox.owner}</Name>
        </dd>
      </dl>
      <div class="lines">
        <Line name={t("sandboxes.memory_line")} values={past.current.map((each) => each.memory)} shown={size} />
        <Line name={t("sandboxes.cpu_line")} values={rates} shown={share} />
      </div>
      <Port base={base} />
      <button type="button" onClick={reload}>
        {t("action.reload")}
      </button>
    </>
  );
}

/** A line over time, with its last and its largest value in words. */
function Line({ name, values, shown }: { name: string; values: number[]; shown: (value: number) => string }): JSX.Element | null {
  if (values.length < 2) return null;
  const most = Math.max(...values, 1e-9);
  const points = values.map((value, place) => `${((place / (values.length - 1)) * 300).toFixed(1)},${(40 - (value / most) * 38).toFixed(1)}`).join(" ");
  return (
    <figure>
      <figcaption>
        {name} <span class="fine">{t("sandboxes.line", { now: shown(values.at(-1)!), most: shown(Math.max(...values)) })}</span>
      </figcaption>
      <svg class="line" viewBox="0 0 300 42" preserveAspectRatio="none" aria-hidden="true">
        <polyline points={points} />
      </svg>
    </figure>
  );
}

/** A link to a server that code started inside. */
function Port({ base }: { base: string[] }): JSX.Element {
  const port = useSignal("8000");
  const link = useSignal<{ url: string | null } | null>(null);
  const make = async (): Promise<void> => {
    link.value = await call<{ url: string | null }>("POST", at([...base, "port-links"]), { port: Number(port.value), ttl: 3600 });
  };
  return (
    <details>
      <summary>{t("sandboxes.preview")}</summary>
      <Field label={t("sandboxes.port")}>
        <input type="number" min={1} max={65535} value={port.value} onInput={(event) => (port.value = event.currentTarget.value)} />
      </Field>
      <Action act={make}>{t("sandboxes.open_port")}</Action>
      {link.value &&
        (link.value.url ? (
          <p>
            <a href={link.value.url} target="_blank" rel="noopener noreferrer">
              {t("sandboxes.open_preview")}
            </a>
          </p>
        ) : (
          <p class="hint">{t("sandboxes.no_port")}</p>
        ))}
    </details>
  );
}

interface TerminalItem {
  id: string;
  ended?: boolean;
  exit_code?: number | null;
  reason?: string | null;
}

function Terminals({ base }: { base: string[] }): JSX.Element {
  const conversation = [...base, "conversations", "default", "terminals"];
  const shown = useSignal<string | null>(null);
  const list = useLoaded<TerminalItem[]>(async () => {
    try {
      return (await get<{ items: TerminalItem[] }>(at(conversation, { peek: true }))).items;
    } catch {
      return []; // the conversation has not begun
    }
  });
  const make = async (): Promise<void> => {
    const made = await call<{ id: string }>("POST", at(conversation), { rows: 24, columns: 80 });
    shown.value = made.id;
    list.reload();
  };
  return (
    <>
      <div class="buttons">
        <Action kind="primary" act={make}>
          {t("terminals.new")}
        </Action>
        {list.value?.map((each) => (
          <button key={each.id} type="button" aria-pressed={shown.value === each.id} onClick={() => (shown.value = each.id)}>
            <Name>{each.id}</Name>
          </button>
        ))}
      </div>
      {shown.value ? <TerminalView key={shown.value} url={`${location.origin.replace(/^http/, "ws")}${at([...conversation, shown.value, "attach"])}`} /> : <p class="empty">{t("terminals.none")}</p>}
    </>
  );
}

function TerminalView({ url }: { url: string }): JSX.Element {
  const element = useRef<HTMLDivElement>(null);
  const ended = useSignal<string | null>(null);
  useEffect(() => {
    let leave: (() => void) | null = null;
    let over = false;
    void built<typeof import("../parts/xterm")>("terminal").then(({ attach }) => {
      if (!over && element.current) leave = attach(element.current, url, (reason) => (ended.value = reason));
    });
    return () => {
      over = true;
      leave?.();
    };
  }, [url]);
  return (
    <>
      <div ref={element} class="terminal" role="group" aria-label={t("terminals.one")} />
      {ended.value !== null && <p class="fine">{t("terminals.ended", { reason: ended.value })}</p>}
    </>
  );
}

function BoxFiles({ id, base }: { id: string; base: string[] }): JSX.Element {
  const chosen = useSignal("default");
  const names = useLoaded<string[]>(async () => {
    const inspected = await get<{ conversations: { conversation_id: string }[] }>(at([...base, "inspect"], { peek: true }));
    return inspected.conversations.map((each) => each.conversation_id);
  });
  const known = names.value ?? [];
  const current = known.includes(chosen.value) ? chosen.value : (known[0] ?? "default");
  return (
    <>
      {known.length > 1 && (
        <Field label={t("sandboxes.conversation")}>
          <select value={current} onChange={(event) => (chosen.value = event.currentTarget.value)}>
            {known.map((name) => (
              <option key={name} value={name}>
                {safe(name)}
              </option>
            ))}
          </select>
        </Field>
      )}
      <Workspace key={current} sandbox={id} conversation={current} />
    </>
  );
}

interface Entry {
  id: string;
  exec_type: string;
  code: string;
  success: boolean;
  output?: string | null;
  error?: string | null;
  execution_time_ms?: number | null;
  created_at: string;
  notes?: string | null;
  description?: string | null;
}

interface Result {
  text: string;
  error: { name: string; value: string } | null;
}

/** Runs one run of the history again in a fresh sandbox, and shows the second result. */
function Rerun({ base, id }: { base: string[]; id: string }): JSX.Element {
  const reply = useSignal<{ after: Result; differences: string[] } | null>(null);
  const act = async (): Promise<void> => {
    reply.value = null;
    reply.value = await call("POST", at([...base, "runs", id.replace(/^exec-/, "run-"), "rerun"]), {});
  };
  const result = reply.value;
  return (
    <>
      <p title={t("history.rerun_hint")}>
        <Action act={act}>{t("history.rerun")}</Action>
      </p>
      {result && (
        <div role="status">
          <p>{result.differences.length === 0 ? t("history.equal") : t("history.differ", { fields: result.differences.join(", ") })}</p>
          <Output text={result.after.text + (result.after.error ? `${result.after.error.name}: ${result.after.error.value}\n` : "")} />
        </div>
      )}
    </>
  );
}

function History({ base }: { base: string[] }): JSX.Element {
  const list = useLoaded<Entry[]>(async () => (await get<{ entries: Entry[] }>(at([...base, "history"], { limit: 100, peek: true }))).entries);
  return (
    <>
      <button type="button" onClick={list.reload}>
        {t("action.reload")}
      </button>
      <Loaded of={list}>
        {(entries) =>
          entries.length === 0 ? (
            <p class="empty">{t("history.none")}</p>
          ) : (
            <ul class="history">
              {entries.map((entry) => (
                <li key={entry.id}>
                  <details>
                    <summary>
                      <span class={entry.success ? "ok" : "bad"}>{entry.success ? t("history.ok") : t("history.failed")}</span> <code>{safe(entry.code.split("\n", 1)[0]!.slice(0, 100))}</code>{" "}
                      <span class="fine">
                        {safe(entry.exec_type)} · {when(entry.created_at)}
                        {entry.execution_time_ms != null && ` · ${took(entry.execution_time_ms / 1000)}`}
                      </span>
                    </summary>
                    {entry.description && <p>{safe(entry.description)}</p>}
                    {entry.notes && <p>{safe(entry.notes)}</p>}
                    <Output text={entry.code} />
                    {entry.output && <Output text={entry.output} />}
                    {entry.error && <Output text={entry.error} />}
                    <Rerun base={base} id={entry.id} />
                  </details>
                </li>
              ))}
            </ul>
          )
        }
      </Loaded>
    </>
  );
}

interface BoxEvent {
  id: number;
  at: string;
  type: string;
  cause: string | null;
  details: Record<string, unknown>;
}

function Events({ base, turn }: { base: string[]; turn: number }): JSX.Element {
  const list = useLoaded<BoxEvent[]>(() => all<BoxEvent>((cursor) => at([...base, "events"], { limit: 200, cursor, peek: true }), 2000), [turn]);
  return (
    <Loaded of={list}>
      {(events) => (
        <DataTable label={t("events.table")} columns={[t("events.at"), t("events.kind"), t("events.cause"), t("events.details")]}>
            {[...events].reverse().map((event) => (
              <tr key={event.id}>
                <td>{when(event.at)}</td>
                <td>{safe(event.type)}</td>
                <td>{safe(event.cause ?? "")}</td>
                <td class="fine">{Object.keys(event.details).length ? safe(JSON.stringify(event.details)) : ""}</td>
              </tr>
            ))}
        </DataTable>
      )}
    </Loaded>
  );
}

interface Decided {
  at: number;
  allowed: boolean;
  rule: string;
  host: string;
  port: number;
  method: string;
  path: string | null;
  reason: string;
}

function Network({ base, turn }: { base: string[]; turn: number }): JSX.Element {
  const list = useLoaded<{ items: Decided[]; complete: boolean }>(() => get(at([...base, "network"], { peek: true })), [turn]);
  return (
    <Loaded of={list}>
      {({ items, complete }) =>
        items.length === 0 ? (
          <p class="empty">{t("network.none")}</p>
        ) : (
          <>
            {!complete && <p class="fine">{t("network.more")}</p>}
            <DataTable label={t("network.table")} columns={[t("events.at"), t("network.decision"), t("network.request"), t("network.rule")]}>
                {items.map((each, place) => (
                  <tr key={place}>
                    <td>{when(each.at)}</td>
                    <td class={each.allowed ? "ok" : "bad"}>{each.allowed ? t("network.allowed") : t("network.refused")}</td>
                    <td>{safe(`${each.method} ${each.host}:${each.port}${each.path ?? ""}`)}</td>
                    <td class="fine">{safe(`${each.rule} ${each.reason}`)}</td>
                  </tr>
                ))}
            </DataTable>
          </>
        )
      }
    </Loaded>
  );
}

interface Wall {
  name: string;
  demanded: string;
  means: string;
  weaker: boolean;
}

function Walls({ base }: { base: string[] }): JSX.Element {
  const receipt = useLoaded<Record<string, unknown> | null>(async () => (await get<{ receipt: Record<string, unknown> | null }>(at([...base, "conversations", "default", "receipt"], { peek: true }))).receipt);
  const copy = (): Promise<void> => navigator.clipboard.writeText(JSON.stringify(receipt.value, null, 2));
  if (receipt.value === null && receipt.error === null) return <p class="empty">{t("walls.none")}</p>;
  return (
    <Loaded of={receipt}>
      {(found) => {
        const walls = (found!.walls ?? []) as Wall[];
        const changed = Object.keys((found!.changed ?? {}) as Record<string, unknown>);
        return (
          <>
            <div class="buttons">
              <button type="button" onClick={receipt.reload}>
                {t("walls.again")}
              </button>
              <Action act={copy}>{t("walls.copy")}</Action>
            </div>
            {changed.length > 0 && <p class="failure" role="alert">{t("walls.changed", { walls: safe(changed.join(", ")) })}</p>}
            <DataTable label={t("sandboxes.tabs.walls")} columns={[t("walls.name"), t("walls.demanded"), t("walls.in_force")]}>
                {walls.map((wall) => (
                  <tr key={wall.name}>
                    <th scope="row">{safe(wall.name)}</th>
                    <td>{safe(wall.demanded)}</td>
                    <td>
                      {safe(wall.means)} {wall.weaker && <span class="badge waiting">{t("walls.weaker")}</span>}
                    </td>
                  </tr>
                ))}
            </DataTable>
          </>
        );
      }}
    </Loaded>
  );
}
