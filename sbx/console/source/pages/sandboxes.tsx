// The live sandboxes, and those that ended.
import { useSignal } from "@preact/signals";
import type { JSX } from "preact";
import { useEffect } from "preact/hooks";
import { at, call, get } from "../api/calls";
import type { Ended, PolicyItem, Sandbox, Usage } from "../api/types";
import { duration, seconds, size, t, took, when } from "../i18n";
import { follow } from "../live/socket";
import { Action, DataTable, Dialog, Field, Loaded, Name, safe, useLoaded, useNow } from "../parts/common";
import { go } from "../shell/route";
import { me, onNotice } from "../shell/state";

interface Page {
  items: Sandbox[];
  next_cursor: string | null;
  ended: Ended[];
}

export async function sandboxes(): Promise<{ items: Sandbox[]; ended: Ended[] }> {
  const items: Sandbox[] = [];
  let ended: Ended[] = [];
  let cursor: string | undefined;
  do {
    const page: Page = await get<Page>(at(["v1", "sandboxes"], { detail: true, ended: true, limit: 200, cursor }));
    items.push(...page.items);
    if (!cursor) ended = page.ended;
    cursor = page.next_cursor ?? undefined;
  } while (cursor && items.length < 2000);
  return { items, ended };
}

/** The usage of sandboxes, followed without a use of them. */
export function useUsage(ids: string[] | null): Record<string, Usage> {
  const usage = useSignal<Record<string, Usage>>({});
  const key = JSON.stringify(ids);
  useEffect(
    () =>
      follow({
        request: () => ({ topic: "usage", sandbox_ids: ids, interval_s: 2 }),
        onEvent: (event) => {
          usage.value = event.items as Record<string, Usage>;
        },
      }),
    [key],
  );
  return usage.value;
}

export function Bar({ label, value, most }: { label: string; value: number | undefined; most: number | undefined }): JSX.Element {
  if (value === undefined) return <span class="fine">–</span>;
  const text = most ? `${size(value)} / ${size(most)}` : size(value);
  return (
    <span class="bar">
      <meter aria-label={label} min={0} max={most || value || 1} value={value} /> {text}
    </span>
  );
}

export function SandboxesPage(): JSX.Element {
  const making = useSignal(false);
  const filter = useSignal("");
  const list = useLoaded(sandboxes);
  const usage = useUsage(null);
  const now = useNow(5000);
  useEffect(() => onNotice((notice) => notice.type === "sandbox" && list.reload()), []);
  const can = me.value!.can.sandboxes;
  return (
    <div class="page">
      <h1>{t("nav.sandboxes")}</h1>
      <div class="buttons">
        <button type="button" class="primary" disabled={can !== true} title={can === true ? undefined : can.message} onClick={() => (making.value = true)}>
          {t("sandboxes.new")}
        </button>
        <input type="search" aria-label={t("sandboxes.filter")} placeholder={t("sandboxes.filter")} value={filter.value} onInput={(event) => (filter.value = event.currentTarget.value)} />
      </div>
      <Loaded of={list}>
        {({ items, ended }) => {
          const shown = items.filter((box) => `${box.id} ${box.profile} ${box.status} ${box.session_id ?? ""}`.includes(filter.value));
          return (
            <>
              {shown.length === 0 && <p class="empty">{t("sandboxes.none")}</p>}
              {shown.length > 0 && (
                <DataTable label={t("nav.sandboxes")} columns={[t("sandboxes.id"), t("sandboxes.state"), t("sandboxes.policy"), t("sandboxes.kernels"), t("sandboxes.cpu"), t("sandboxes.memory"), t("sandboxes.disk"), t("sandboxes.expires")]}>
                      {shown.map((box) => {
                        const used = usage[box.id] ?? box.usage ?? {};
                        return (
                          <tr key={box.id}>
                            <td>
                              <a href={`/console/sandboxes/${encodeURIComponent(box.id)}`}>
                                <Name>{box.id}</Name>
                              </a>
                              {box.session_id && (
                                <small class="fine">
                                  {" "}
                                  <Name>{box.session_id}</Name>
                                </small>
                              )}
                            </td>
                            <td>
                              <span class={`state ${box.status}`}>{t(`sandboxes.states.${box.status}`)}</span>
                              {box.busy && <span class="badge">{t("sandboxes.busy")}</span>}
                            </td>
                            <td>
                              <Name>{box.profile}</Name>
                            </td>
                            <td>{box.kernels}</td>
                            <td>{used.cpu_s === undefined ? "–" : took(used.cpu_s)}</td>
                            <td>
                              <Bar label={t("sandboxes.memory")} value={used.memory} most={used.memory_max} />
                            </td>
                            <td>
                              <Bar label={t("sandboxes.disk")} value={used.disk} most={used.disk_max} />
                            </td>
                            <td>{box.expires_at === null ? t("sandboxes.never") : duration(seconds(box.expires_at) - now)}</td>
                          </tr>
                        );
                      })}
                </DataTable>
              )}
              {ended.length > 0 && (
                <details>
                  <summary>{t("sandboxes.ended", { count: ended.length })}</summary>
                  <ul class="links">
                    {ended.map((box) => (
                      <li key={box.id}>
                        <Name>{box.id}</Name> <span class="fine">{when(box.deleted_at)} · {safe(box.cause ?? "")}</span>
                      </li>
                    ))}
                  </ul>
                </details>
              )}
            </>
          );
        }}
      </Loaded>
      {making.value && <NewSandbox onClose={() => (making.value = false)} />}
    </div>
  );
}

function NewSandbox({ onClose }: { onClose: () => void }): JSX.Element {
  const policies = useLoaded<PolicyItem[]>(async () => (await get<{ items: PolicyItem[] }>("/v1/policies")).items);
  const policy = useSignal(me.value!.defaults.policy);
  const ttl = useSignal("3600");
  const memory = useSignal("");
  const time = useSignal("");
  const make = async (): Promise<void> => {
    const limits = { ...(memory.value ? { memory_max: memory.value } : {}), ...(time.value ? { run_timeout: time.value } : {}) };
    const narrower = Object.keys(limits).length ? { narrower: { limits } } : {};
    const made = await call<{ id: string }>("POST", "/v1/sandboxes", { profile: policy.value, ttl: Number(ttl.value) || null, ...narrower });
    go(`/console/sandboxes/${encodeURIComponent(made.id)}`);
  };
  return (
    <Dialog title={t("sandboxes.new")} onClose={onClose}>
      <Field label={t("sandboxes.policy")}>
        <select value={policy.value} onChange={(event) => (policy.value = event.currentTarget.value)}>
          {(policies.value ?? [{ name: policy.value, problem: null, description: "" } as PolicyItem]).map((each) => (
            <option key={each.name} value={each.name} disabled={each.problem !== null}>
              {each.name}
            </option>
          ))}
        </select>
      </Field>
      <Field label={t("sandboxes.ttl")} hint={t("sandboxes.ttl_hint")}>
        <input type="number" min={0} value={ttl.value} onInput={(event) => (ttl.value = event.currentTarget.value)} />
      </Field>
      <details>
        <summary>{t("sandboxes.limits")}</summary>
        <Field label={t("sandboxes.memory")} hint={t("sandboxes.memory_hint")}>
          <input type="text" value={memory.value} onInput={(event) => (memory.value = event.currentTarget.value)} />
        </Field>
        <Field label={t("sandboxes.run_timeout")} hint={t("sandboxes.time_hint")}>
          <input type="text" value={time.value} onInput={(event) => (time.value = event.currentTarget.value)} />
        </Field>
      </details>
      <div class="buttons">
        <Action kind="primary" act={make}>
          {t("action.create")}
        </Action>
        <button type="button" onClick={onClose}>
          {t("action.cancel")}
        </button>
      </div>
    </Dialog>
  );
}
