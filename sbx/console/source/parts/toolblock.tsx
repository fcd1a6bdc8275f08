// One call of a tool, in its four looks, and the question for an approval.
import { useSignal } from "@preact/signals";
import type { JSX } from "preact";
import { useMemo } from "preact/hooks";
import { call } from "../api/calls";
import { duration, errorText, t, took } from "../i18n";
import { isDenied, resultBesideError } from "../live/reduce";
import type { DryRun, FileChange, Remember, ToolExecution } from "../types/agent";
import { setting } from "../shell/state";
import { Action, Dialog, exact, Field, Name, safe, useNow } from "./common";
import { Output, Outputs, type Place } from "./output";

const ICONS: Record<string, string> = {
  loader: "M12 3v4M12 17v4M3 12h4M17 12h4M5.6 5.6l2.9 2.9M15.5 15.5l2.9 2.9M5.6 18.4l2.9-2.9M15.5 8.5l2.9-2.9",
  check: "M4 12.5l5.5 5.5L20 7",
  x: "M6 6l12 12M18 6L6 18",
  "shield-check": "M12 3l7 3v6c0 4.5-3 7.5-7 9-4-1.5-7-4.5-7-9V6zM9 12l2.2 2.2L15.2 10",
};
const ICON_OF = { running: "loader", done: "check", error: "x", pending_approval: "shield-check" } as const;

export function Icon({ name }: { name: string }): JSX.Element {
  return (
    <svg class={`icon icon-${name}`} data-icon={name} viewBox="0 0 24 24" aria-hidden="true">
      <path d={ICONS[name]} />
    </svg>
  );
}

/** The state of a call in words: two more than it has looks. */
export function stateOf(execution: ToolExecution): string {
  if (execution.stopped) return t("tool.status.stopped");
  if (isDenied(execution)) return t("tool.status.denied");
  return t(`tool.status.${execution.status}`);
}

/** The argument that says most, in one line. */
function summary(args: Record<string, unknown>): string {
  const main = ["command", "code", "path", "query"].map((name) => args[name]).find((value) => typeof value === "string");
  const text = typeof main === "string" ? main : JSON.stringify(args);
  return text.split("\n", 1)[0]!.slice(0, 120);
}

/** The steps of a plan; null for arguments of another form. */
function planOf(args: Record<string, unknown>): { text: string; state: string }[] | null {
  if (!Array.isArray(args.steps)) return null;
  const steps = args.steps as { text?: unknown; state?: unknown }[];
  return steps.slice(0, 50).map((step) => ({ text: String(step?.text ?? ""), state: String(step?.state ?? "") }));
}

interface BlockProps {
  execution: ToolExecution;
  place: Place | null;
  /** A later step has begun. */
  past: boolean;
}

export function ToolCallBlock({ execution, place, past }: BlockProps): JSX.Element {
  const chosen = useSignal<boolean | null>(null);
  const finished = execution.status === "done";
  const asks = execution.status === "pending_approval"; // the question has the arguments
  const collapses = finished && past && setting("tools", "collapse") === "collapse";
  const open = chosen.value ?? !(asks || collapses);
  const state = stateOf(execution);
  const plan = execution.toolName === "plan" ? planOf(execution.toolArgs) : null;
  return (
    <section class={`tool ${execution.status}`} role="group" aria-label={`${execution.toolName}: ${state}`} data-status={execution.status}>
      <header>
        <Icon name={ICON_OF[execution.status]} />
        <strong>
          <Name>{execution.toolName}</Name>
        </strong>
        <code class="summary">{plan ? t("plan.count", { done: plan.filter((step) => step.state === "done").length, count: plan.length }) : safe(summary(execution.toolArgs))}</code>
        {!execution.sandboxed && <span class="on-host">{t("tool.on_host")}</span>}
        <span class="state">{state}</span>
        {execution.durationMs !== undefined && <span class="fine">{execution.cached ? t("tool.cached") : took(execution.durationMs / 1000)}</span>}
        <button type="button" class="plain" aria-expanded={open} onClick={() => (chosen.value = !open)}>
          {t("tool.details")}
        </button>
      </header>
      {execution.status === "pending_approval" && <Question execution={execution} />}
      {open && (
        <div class="body">
          <section aria-label={t("tool.arguments")} role="region">
            {plan ? (
              <ol class="plan">
                {plan.map((step, number) => (
                  <li key={number} class={step.state}>
                    <Name>{step.text}</Name> <span class="fine">{t(`plan.${step.state}`, { defaultValue: safe(step.state) })}</span>
                  </li>
                ))}
              </ol>
            ) : (
              <Arguments of={execution.toolArgs} />
            )}
          </section>
          {execution.output.length > 0 && (
            <section aria-label={t("tool.output")} role="region">
              <Output text={execution.output.map((piece) => piece.text).join("")} live={execution.status === "running"} />
            </section>
          )}
          {execution.result !== undefined && (
            <section aria-label={t("tool.result")} role="region">
              {execution.error && <p class="failure">{errorText(execution.error)}</p>}
              {(!execution.error || resultBesideError(execution)) && <Output text={resultBesideError(execution)} />}
            </section>
          )}
        </div>
      )}
      {execution.outputs && execution.outputs.length > 0 && <Outputs bundles={execution.outputs} place={place} />}
    </section>
  );
}

/** All arguments of a call. None is left out or shortened by its name. */
function Arguments({ of }: { of: Record<string, unknown> }): JSX.Element {
  return (
    <>
      {Object.entries(of).map(([name, value]) => (
        <div key={name}>
          <bdi class="fine">{exact(name)}</bdi>
          <Output literal text={typeof value === "string" ? value : JSON.stringify(value, null, 2)} />
        </div>
      ))}
    </>
  );
}

/** The arguments of a call and the changes that it would make, and then the buttons of a person. */
export function Question({ execution }: { execution: ToolExecution }): JSX.Element {
  const always = useSignal(false);
  const now = useNow();
  const left = (execution.expiresAt ?? 0) - now;
  const decide = (body: unknown): Promise<unknown> => call("POST", `/api/v1/approvals/${encodeURIComponent(execution.toolCallId)}`, body);
  const command = execution.toolArgs.command;
  const asks = execution.toolName === "request_access";
  const possible = execution.rememberAs ?? [];
  const lasting = possible.filter((each) => each === "hour" || each === "conversation");
  const kinds = possible.filter((each) => each === "exact" || each === "prefix");
  return (
    <div class="question">
      {asks && <RequestedAccess asked={execution.toolArgs} />}
      <section role="region" aria-label={t("tool.arguments")}>
        <Arguments of={execution.toolArgs} />
      </section>
      {execution.dryRun && <Changes run={execution.dryRun} />}
      <div class="buttons">
        <Action kind="primary" act={() => decide({ approved: true })}>
          {t(asks ? "approval.access.once" : "approval.allow")}
        </Action>
        {lasting.map((remember) => (
          <Action key={remember} act={() => decide({ approved: true, remember })}>
            {t(`approval.access.${remember}`)}
          </Action>
        ))}
        <Action act={() => decide({ approved: false })}>{t("approval.deny")}</Action>
        {kinds.length > 0 && (
          <button type="button" onClick={() => (always.value = true)}>
            {t("approval.always")}
          </button>
        )}
        <span role="timer" aria-label={t("approval.time_left")}>
          {duration(left)}
        </span>
      </div>
      {always.value && <AlwaysDialog command={typeof command === "string" ? command : ""} kinds={kinds} decide={decide} onClose={() => (always.value = false)} />}
    </div>
  );
}

const KINDS = ["network", "secret", "directory", "run_time", "memory", "package"];

/** The access in the words of sbx, and then the reason, which a model wrote. */
function RequestedAccess({ asked }: { asked: Record<string, unknown> }): JSX.Element {
  const kind = KINDS.find((each) => each === asked.kind);
  return (
    <>
      {kind && (
        <p>
          {t(`approval.access.${kind}`)} <code>{exact(String(asked.target))}</code>
        </p>
      )}
      {asked.reason !== undefined && (
        <p class="fine">
          {t("approval.access.reason")} <bdi>{exact(String(asked.reason))}</bdi>
        </p>
      )}
    </>
  );
}

function AlwaysDialog({ command, kinds, decide, onClose }: { command: string; kinds: Remember[]; decide: (body: unknown) => Promise<unknown>; onClose: () => void }): JSX.Element {
  const kind = useSignal(kinds[0]);
  const prefix = useSignal(command.split(/\s+/).slice(0, 2).join(" "));
  const act = async (): Promise<void> => {
    const more = kind.value === "prefix" ? { remember: "prefix", prefix: prefix.value } : { remember: "exact" };
    await decide({ approved: true, ...more });
    onClose();
  };
  return (
    <Dialog title={t("approval.always_title")} onClose={onClose}>
      {kinds.map((each) => (
        <label key={each} class="choice">
          <input type="radio" name="kind" checked={kind.value === each} onChange={() => (kind.value = each)} />
          {t(`approval.${each}`)}
        </label>
      ))}
      {kinds.includes("prefix") && (
        <Field label={t("approval.prefix_field")}>
          <input type="text" value={prefix.value} disabled={kind.value !== "prefix"} onInput={(event) => (prefix.value = event.currentTarget.value)} />
        </Field>
      )}
      <div class="buttons">
        <Action kind="primary" act={act}>
          {t("approval.allow_always")}
        </Action>
        <button type="button" onClick={onClose}>
          {t("action.cancel")}
        </button>
      </div>
    </Dialog>
  );
}

const LINES = 2000;
const SIGNS: Record<string, string> = { added: "+", changed: "~", removed: "−" };

export function Changes({ run }: { run: DryRun }): JSX.Element {
  const changes = run.changes ?? [];
  return (
    <section role="region" aria-label={t("approval.changes")} class="changes">
      <h3>{t("approval.changes")}</h3>
      {run.exit_code !== null && run.exit_code !== undefined && <p class="fine">{t("approval.exit_code", { code: run.exit_code })}</p>}
      {run.output && <Output text={run.output} />}
      {changes.length === 0 && <p>{t("approval.no_changes")}</p>}
      {changes.map((change) => (
        <Change key={change.path} change={change} />
      ))}
      {run.host_executables?.map(({ path, program }) => (
        <p key={path} class="failure">
          <bdi>{exact(path)}</bdi> {t("approval.host_program", { program: exact(program) })}
        </p>
      ))}
      {run.truncated && <p class="fine">{t("approval.truncated")}</p>}
      {(run.left_out?.length ?? 0) > 0 && <p class="fine">{t("approval.left_out", { paths: safe(run.left_out!.join(", ")) })}</p>}
    </section>
  );
}

function Change({ change }: { change: FileChange }): JSX.Element {
  const all = useSignal(false);
  const lines = useMemo(() => (change.diff ? change.diff.split("\n") : []), [change.diff]);
  const shown = all.value ? lines : lines.slice(0, LINES);
  return (
    <div role="group" aria-label={t(`approval.${change.kind}`, { path: safe(change.path), interpolation: { escapeValue: false } })} class={`change ${change.kind}`}>
      <p class="path">
        <b aria-hidden="true">{SIGNS[change.kind]}</b> <bdi>{exact(change.path)}</bdi>
      </p>
      {lines.length > 0 && (
        <pre class="diff" tabIndex={0}>
          {shown.map((line, place) => (
            <span key={place} class={line.startsWith("+") ? "plus" : line.startsWith("-") ? "minus" : ""}>
              {exact(line)}
              {"\n"}
            </span>
          ))}
        </pre>
      )}
      {shown.length < lines.length && (
        <p class="fine">
          {t("approval.more_lines", { count: lines.length - shown.length })}{" "}
          <button type="button" class="plain" onClick={() => (all.value = true)}>
            {t("output.show_all")}
          </button>
        </p>
      )}
    </div>
  );
}
