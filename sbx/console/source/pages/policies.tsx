// The policies that a sandbox can have, to read: in words, with their file and their examples.
import { useSignal } from "@preact/signals";
import type { JSX } from "preact";
import { at, get } from "../api/calls";
import type { PolicyItem } from "../api/types";
import { t } from "../i18n";
import { DataTable, Loaded, Name, safe, useLoaded } from "../parts/common";
import { Output } from "../parts/output";

interface Values {
  processes: boolean;
  network: { mode: string; allow: string[]; rule: { host: string }[] };
  limits: Record<string, unknown>;
  uploads: { max_file_size: string; max_file_count: number };
  filesystem: { mount: { source?: string }[] };
  honeytoken: { enabled: boolean };
}

interface Detail {
  name: string;
  policy: Values;
  source: string | null;
  expect: { run: string; then: string; why: string }[];
}

export function PoliciesPage(): JSX.Element {
  const list = useLoaded<PolicyItem[]>(async () => (await get<{ items: PolicyItem[] }>("/v1/policies")).items);
  return (
    <div class="page">
      <h1>{t("nav.policies")}</h1>
      <Loaded of={list}>
        {(policies) => (
          <>
            {policies.map((policy) => (
              <Policy key={policy.name} policy={policy} />
            ))}
          </>
        )}
      </Loaded>
    </div>
  );
}

/** One policy. Its values are loaded when it is opened. */
function Policy({ policy }: { policy: PolicyItem }): JSX.Element {
  const opened = useSignal(false);
  return (
    <details onToggle={(event) => (opened.value ||= event.currentTarget.open)}>
      <summary>
        <strong>
          <Name>{policy.name}</Name>
        </strong>{" "}
        {safe(policy.description)}{" "}
        {policy.problem ? <span class="bad">{safe(policy.problem)}</span> : <span class="fine">{policy.network_mode === "none" ? t("policies.no_network") : t("policies.network")}</span>}
      </summary>
      {opened.value && policy.problem === null && <PolicyDetail name={policy.name} />}
    </details>
  );
}

/** A policy as short sentences. */
function words({ processes, network, limits, uploads, filesystem, honeytoken }: Values): string[] {
  const hosts = [...network.allow, ...network.rule.map((rule) => rule.host)].map(safe).join(", ");
  const mounts = filesystem.mount.map((mount) => safe(mount.source ?? "?")).join(", ");
  const limit = (name: string): string => safe(String(limits[name]));
  return [
    network.mode === "none" ? t("policies.no_network") : hosts ? t("policies.hosts", { hosts }) : t("policies.no_hosts"),
    processes ? t("policies.programs") : t("policies.no_programs"),
    t("policies.memory", { value: limit("memory_max") }),
    t("policies.cpu", { value: limit("cpu_quota") }),
    t("policies.tasks", { value: limit("tasks_max") }),
    t("policies.files", { value: limit("workspace_max") }),
    t("policies.run_timeout", { value: limit("run_timeout"), most: limit("wall_time") }),
    t("policies.uploads", { count: uploads.max_file_count, size: safe(uploads.max_file_size) }),
    ...(mounts ? [t("policies.mounts", { paths: mounts })] : []),
    ...(honeytoken.enabled ? [t("policies.honeytoken")] : []),
  ];
}

function PolicyDetail({ name }: { name: string }): JSX.Element {
  const detail = useLoaded<Detail>(() => get(at(["v1", "policies", name])));
  return (
    <Loaded of={detail}>
      {({ policy, source, expect }) => (
        <>
          <div class="columns halves">
            <section>
              <h2>{t("policies.in_words")}</h2>
              <ul class="words">
                {words(policy).map((sentence) => (
                  <li key={sentence}>{sentence}</li>
                ))}
              </ul>
              <h2>{t("policies.limits")}</h2>
              <dl class="facts">
                {Object.entries(policy.limits).map(([limit, value]) => (
                  <div key={limit}>
                    <dt>{safe(limit)}</dt>
                    <dd>{safe(String(value))}</dd>
                  </div>
                ))}
              </dl>
            </section>
            <section>
              <h2>{source === null ? t("policies.values") : t("policies.file")}</h2>
              <Output text={source ?? JSON.stringify(policy, null, 2)} />
            </section>
          </div>
          {expect.length > 0 && (
            <>
              <h2>{t("policies.examples")}</h2>
              <DataTable label={t("policies.examples")} columns={[t("policies.code"), t("policies.outcome"), t("policies.why")]}>
                {expect.map((example) => (
                  <tr key={example.run}>
                    <td>
                      <code class="lines">{safe(example.run)}</code>
                    </td>
                    <td class={example.then === "allowed" ? "ok" : "bad"}>{["allowed", "denied", "refused", "killed"].includes(example.then) ? t(`policies.${example.then}`) : safe(example.then)}</td>
                    <td>{safe(example.why)}</td>
                  </tr>
                ))}
              </DataTable>
            </>
          )}
        </>
      )}
    </Loaded>
  );
}
