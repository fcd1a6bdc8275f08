// All calls that wait for a decision, the oldest first, and the remembered rules.
import type { JSX } from "preact";
import { useEffect } from "preact/hooks";
import { all, at, call, get } from "../api/calls";
import type { Approval, Chat, Project, Rule } from "../api/types";
import { t, when } from "../i18n";
import { Action, DataTable, exact, Loaded, Name, safe, useLoaded } from "../parts/common";
import { Icon, Question } from "../parts/toolblock";
import { approvals, onNotice } from "../shell/state";
import type { ToolExecution } from "../types/agent";

export function executionOf(approval: Approval): ToolExecution {
  return {
    toolCallId: approval.tool_call_id,
    toolName: approval.tool_name,
    toolArgs: approval.tool_args,
    status: "pending_approval",
    sandboxed: true,
    expiresAt: approval.expires_at,
    rememberAs: approval.remember_as,
    dryRun: approval.dry_run,
    output: [],
  };
}

/** The conversation, the project and the directory of a call. */
function Where({ conversation, projects }: { conversation: string; projects: Project[] | null }): JSX.Element {
  const chat = useLoaded<Chat>(() => get(at(["api", "v1", "conversations", conversation])), [conversation]);
  const project = projects?.find((each) => each.id === chat.value?.project_id);
  return (
    <span class="where">
      <a href={`/console/conversations/${encodeURIComponent(conversation)}`}>
        <Name>{chat.value?.title ?? conversation}</Name>
      </a>
      {project && (
        <>
          {" "}
          <Name>{project.name}</Name> <code>{safe(project.working_directory)}</code> {!project.sandbox_enabled && <span class="on-host">{t("tool.on_host")}</span>}
        </>
      )}
    </span>
  );
}

export function ApprovalsPage(): JSX.Element {
  const projects = useLoaded<Project[]>(() => all<Project>((cursor) => at(["api", "v1", "projects"], { limit: 100, cursor })));
  const named = (id: string): string => projects.value?.find((each) => each.id === id)?.name ?? id;
  const rules = useLoaded<Rule[]>(() => all<Rule>((cursor) => at(["api", "v1", "approvals", "rules"], { limit: 200, cursor })));
  useEffect(() => onNotice((notice) => notice.type === "approval.decided" && notice.remembered && rules.reload()), []);
  return (
    <div class="page">
      <h1>{t("nav.approvals")}</h1>
      {approvals.value.length === 0 ? (
        <p class="empty">{t("approval.none")}</p>
      ) : (
        <ul class="questions" aria-label={t("approval.waiting")}>
          {approvals.value.map((approval) => (
            <li key={approval.tool_call_id}>
              <section class="tool pending_approval" role="group" aria-label={`${approval.tool_name}: ${t("tool.status.pending_approval")}`} data-status="pending_approval">
                <header>
                  <Icon name="shield-check" />
                  <strong>
                    <Name>{approval.tool_name}</Name>
                  </strong>
                  <Where conversation={approval.conversation_id} projects={projects.value} />
                </header>
                <Question execution={executionOf(approval)} />
              </section>
            </li>
          ))}
        </ul>
      )}
      <h2>{t("approval.rules")}</h2>
      <Loaded of={rules}>
        {(items) =>
          items.length === 0 ? (
            <p class="empty">{t("approval.no_rules")}</p>
          ) : (
            <DataTable label={t("approval.rules")} columns={[t("approval.rule"), t("approval.where"), t("approval.made"), ""]}>
                {items.map((rule) => (
                  <tr key={rule.id}>
                    <td>
                      {t(`approval.${rule.kind}`)}: <code>{exact(rule.text)}</code>
                    </td>
                    <td>
                      <Name>{named(rule.project_id ?? rule.conversation_id ?? "")}</Name>
                    </td>
                    <td>{when(rule.created_at)}</td>
                    <td>
                      <Action act={async () => (await call("DELETE", at(["api", "v1", "approvals", "rules", rule.id])), rules.reload())} label={t("approval.revoke", { text: safe(rule.text) })}>
                        {t("approval.revoke_short")}
                      </Action>
                    </td>
                  </tr>
                ))}
            </DataTable>
          )
        }
      </Loaded>
    </div>
  );
}
