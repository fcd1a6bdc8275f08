// One pure function makes the shown conversation of messages and events. It accepts gaps and repeats.
import { parsedJson } from "../api/calls";
import type { AgentEvent, DryRun, Problem, StoredMessage, ToolExecution } from "../types/agent";

export type Item =
  | { kind: "user"; key: string; seq?: number; text: string }
  | { kind: "agent"; key: string; seq?: number; run?: string; text: string; streaming: boolean }
  | { kind: "tool"; key: string; seq?: number; run?: string; step: number; execution: ToolExecution };

export interface RunState {
  runId: string;
  maxSteps: number;
  step: number;
  lastSeq: number;
  ended?: { reason: string; error?: Problem | null };
}

export interface Shown {
  items: Item[];
  run: RunState | null;
}

export const EMPTY: Shown = { items: [], run: null };

function parsed(text: string): Record<string, unknown> {
  try {
    const value = parsedJson(text);
    return typeof value === "object" && value !== null ? (value as Record<string, unknown>) : { value };
  } catch {
    return { arguments: text };
  }
}

/** The items of stored messages. A call without a result runs, or was stopped with its run. */
export function fromMessages(messages: StoredMessage[]): Item[] {
  const items: Item[] = [];
  const calls = new Map<string, ToolExecution>();
  for (const message of messages) {
    const key = `m${message.seq}`;
    if (message.role === "user" || message.role === "summary") {
      items.push({ kind: "user", key, seq: message.seq, text: message.content });
    } else if (message.role === "assistant") {
      if (message.content) {
        items.push({ kind: "agent", key, seq: message.seq, text: message.content, streaming: false });
      }
      for (const call of message.tool_calls ?? []) {
        const execution: ToolExecution = {
          toolCallId: call.id,
          toolName: call.name,
          toolArgs: parsed(call.arguments),
          status: "running",
          sandboxed: true,
          output: [],
        };
        calls.set(call.id, execution);
        items.push({ kind: "tool", key: call.id, seq: message.seq, step: 0, execution });
      }
    } else if (message.tool_call_id) {
      const execution = calls.get(message.tool_call_id);
      if (execution) {
        execution.status = message.is_error ? "error" : "done";
        execution.result = message.content;
        execution.outputs = message.outputs;
        execution.error = message.error;
      }
    }
  }
  return items;
}

function changed(shown: Shown, id: string, change: Partial<ToolExecution>): Item[] {
  return shown.items.map((item) =>
    item.kind === "tool" && item.execution.toolCallId === id
      ? { ...item, execution: { ...item.execution, ...change } }
      : item,
  );
}

function execution(shown: Shown, id: string): ToolExecution | undefined {
  for (const item of shown.items) {
    if (item.kind === "tool" && item.execution.toolCallId === id) return item.execution;
  }
  return undefined;
}

/** The conversation after one more event of its current run. */
export function reduce(shown: Shown, event: AgentEvent): Shown {
  const runId = event.run_id ?? shown.run?.runId ?? "";
  const seq = event.seq ?? (shown.run?.lastSeq ?? 0) + 1;
  if (event.type === "run_start") {
    if (shown.run?.runId === runId && shown.run.lastSeq >= seq) return shown;
    // The run is replayed from its start. Its stored messages would be shown twice.
    const after = event.after_seq ?? 0;
    const items = shown.items.filter(
      (item) => item.kind === "user" || (item.seq !== undefined && item.seq <= after) || (item.seq === undefined && item.run !== runId),
    );
    return { items, run: { runId, maxSteps: event.max_steps, step: 1, lastSeq: seq } };
  }
  const run = shown.run ?? { runId, maxSteps: 0, step: 1, lastSeq: 0 };
  if (run.runId === runId && seq <= run.lastSeq) return shown;
  const next: RunState = { ...run, runId, lastSeq: seq };
  switch (event.type) {
    case "text_delta": {
      const last = shown.items[shown.items.length - 1];
      if (last?.kind === "agent" && last.streaming) {
        const grown: Item = { ...last, text: last.text + event.text };
        return { items: [...shown.items.slice(0, -1), grown], run: next };
      }
      const item: Item = { kind: "agent", key: `${runId}-${seq}`, run: runId, text: event.text, streaming: true };
      return { items: [...shown.items, item], run: next };
    }
    case "tool_start": {
      // A question without a trial rides in the start; older services sent each question here.
      const { dry_run } = event as { dry_run?: DryRun };
      const begun: ToolExecution = {
        toolCallId: event.tool_call_id,
        toolName: event.tool_name,
        toolArgs: event.tool_args,
        status: event.approval_required ? "pending_approval" : "running",
        sandboxed: event.sandboxed,
        expiresAt: event.expires_at,
        rememberAs: event.remember_as,
        dryRun: dry_run,
        output: [],
      };
      return { items: withCall(shown, runId, next.step, begun), run: next };
    }
    case "tool_pending": {
      const pending = { status: "pending_approval", expiresAt: event.expires_at, dryRun: event.dry_run, rememberAs: event.remember_as } as const;
      if (execution(shown, event.tool_call_id)) return { items: changed(shown, event.tool_call_id, pending), run: next };
      const asked: ToolExecution = { toolCallId: event.tool_call_id, toolName: event.tool_name, toolArgs: event.tool_args, sandboxed: true, output: [], ...pending };
      return { items: withCall(shown, runId, next.step, asked), run: next };
    }
    case "tool_output": {
      const before = execution(shown, event.tool_call_id);
      if (!before) return { ...shown, run: next };
      const output = [...before.output, { stream: event.stream, text: event.text }];
      return { items: changed(shown, event.tool_call_id, { output }), run: next };
    }
    case "tool_approval": {
      const decision = { approved: event.approved, by: event.by, remembered: event.remembered };
      const status = event.approved ? "running" : "error";
      return { items: changed(shown, event.tool_call_id, { decision, status }), run: next };
    }
    case "tool_end": {
      const end: Partial<ToolExecution> = {
        status: event.is_error ? "error" : "done",
        result: event.result,
        durationMs: event.duration_ms,
        cached: event.cached,
        outputs: event.outputs,
        error: event.error,
      };
      return { items: changed(shown, event.tool_call_id, end), run: next };
    }
    case "step_end":
      return { items: settled(shown.items), run: { ...next, step: event.step + 1 } };
    case "run_end": {
      const items = settled(shown.items).map((item): Item => {
        if (item.kind !== "tool" || !["running", "pending_approval"].includes(item.execution.status)) return item;
        return { ...item, execution: { ...item.execution, status: "error", stopped: true } };
      });
      const answered = items.some((item) => item.kind === "agent" && item.run === runId);
      if (event.content && !answered) {
        items.push({ kind: "agent", key: `${runId}-end`, run: runId, text: event.content, streaming: false });
      }
      return { items, run: { ...next, ended: { reason: event.reason, error: event.error } } };
    }
  }
}

/** The items with a call at their end. */
function withCall(shown: Shown, run: string, step: number, call: ToolExecution): Item[] {
  const others = shown.items.filter((item) => item.kind !== "tool" || item.execution.toolCallId !== call.toolCallId);
  return [...settled(others), { kind: "tool", key: call.toolCallId, run, step, execution: call }];
}

/** Whether a person or a rule refused the call, in a live run and in stored messages. */
export function isDenied(execution: ToolExecution): boolean {
  return execution.decision?.approved === false || execution.error?.code === "denied";
}

/** The part of the result that the report of its error does not have. */
export function resultBesideError({ result, error }: ToolExecution): string {
  if (result === undefined || !error) return result ?? "";
  const report = `Error (${error.code}): ${error.message}`;
  return result.startsWith(report) ? result.slice(report.length).trim() : result;
}

function settled(items: Item[]): Item[] {
  return items.map((item) => (item.kind === "agent" && item.streaming ? { ...item, streaming: false } : item));
}
