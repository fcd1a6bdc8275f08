// The policies that a sandbox can have, to read.
import type { JSX } from "preact";
import { at, get } from "../api/calls";
import type { PolicyItem } from "../api/types";
import { t } from "../i18n";
import { Loaded, Name, safe, useLoaded } from "../parts/common";
import { Output } from "../parts/output";

interface Detail {
  name: string;
  policy: Record<string, unknown>;
  source: string | null;
  expect: { run?: string; [name: string]: unknown }[];
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
              <details key={policy.name}>
                <summary>
                  <strong>
                    <Name>{policy.name}</Name>
                  </strong>{" "}
                  {safe(policy.description)}{" "}
                  {policy.problem ? <span class="bad">{safe(policy.problem)}</span> : <span class="fine">{policy.network_mode === "none" ? t("policies.no_network") : t("policies.network")}</span>}
                </summary>
                {policy.problem === null && <PolicyDetail name={policy.name} />}
              </details>
            ))}
          </>
        )}
      </Loaded>
    </div>
  );
}

function PolicyDetail({ name }: { name: string }): JSX.Element {
  const detail = useLoaded<Detail>(() => get(at(["v1", "policies", name])));
  return (
    <Loaded of={detail}>
      {(found) => {
        const limits = (found.policy.limits ?? {}) as Record<string, unknown>;
        return (
          <div class="columns wide">
            <section>
              <h2>{t("policies.limits")}</h2>
              <dl class="facts">
                {Object.entries(limits).map(([limit, value]) => (
                  <div key={limit}>
                    <dt>{safe(limit)}</dt>
                    <dd>{safe(String(value))}</dd>
                  </div>
                ))}
              </dl>
              {found.expect.length > 0 && <h2>{t("policies.examples")}</h2>}
              {found.expect.map((example, place) => (
                <Output key={place} text={JSON.stringify(example, null, 2)} />
              ))}
            </section>
            <section>
              <h2>{found.source === null ? t("policies.values") : t("policies.file")}</h2>
              <Output text={found.source ?? JSON.stringify(found.policy, null, 2)} />
            </section>
          </div>
        );
      }}
    </Loaded>
  );
}
