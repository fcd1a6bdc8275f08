import assert from "node:assert/strict";
import { test } from "node:test";
import { EMPTY, fromMessages, isDenied, reduce, resultBesideError, type Shown } from "../live/reduce";
import type { AgentEvent, StoredMessage } from "../types/agent";

const start: AgentEvent = { type: "run_start", seq: 1, run_id: "r", model: "m", max_steps: 10, sandboxed: true, after_seq: 0 };

function played(events: AgentEvent[], from: Shown = EMPTY): Shown {
  return events.reduce(reduce, from);
}

function statuses(shown: Shown): string[] {
  return shown.items.flatMap((item) => (item.kind === "tool" ? [item.execution.status] : []));
}

test("a call that needs an approval begins in this state", () => {
  const shown = played([
    start,
    { type: "tool_start", seq: 2, tool_call_id: "c", tool_name: "t", tool_args: { command: "x" }, approval_required: true, expires_at: 5, sandboxed: true },
  ]);
  assert.deepEqual(statuses(shown), ["pending_approval"]);
  const allowed = reduce(shown, { type: "tool_approval", seq: 3, tool_call_id: "c", approved: true, by: "me", remembered: null });
  assert.deepEqual(statuses(allowed), ["running"]);
  const denied = reduce(shown, { type: "tool_approval", seq: 3, tool_call_id: "c", approved: false, by: "me", remembered: null });
  assert.deepEqual(statuses(denied), ["error"]);
});

const tried: AgentEvent = { type: "tool_start", seq: 2, tool_call_id: "c", tool_name: "t", tool_args: { command: "x" }, approval_required: null, sandboxed: true };
const dryRun = { status: "ok", exit_code: 0, output: "o", changes: [] };
const pending: AgentEvent = { type: "tool_pending", seq: 4, tool_call_id: "c", tool_name: "t", tool_args: { command: "x" }, expires_at: 5, dry_run: dryRun };

test("a call that is tried runs, shows its output, and then asks", () => {
  const running = played([start, tried, { type: "tool_output", seq: 3, tool_call_id: "c", stream: "stdout", text: "live" }]);
  assert.deepEqual(statuses(running), ["running"]);
  const asks = reduce(running, pending);
  const item = asks.items[0]!;
  assert.equal(item.kind === "tool" && item.execution.status, "pending_approval");
  assert.deepEqual(item.kind === "tool" && [item.execution.expiresAt, item.execution.dryRun, item.execution.output[0]?.text], [5, dryRun, "live"]);
  const denied = reduce(asks, { type: "tool_approval", seq: 5, tool_call_id: "c", approved: false, by: "me", remembered: null });
  assert.deepEqual(statuses(denied), ["error"]);
});

test("a question without its start makes the block", () => {
  const item = played([start, pending]).items[0]!;
  assert.deepEqual(item.kind === "tool" && [item.execution.status, item.execution.toolArgs], ["pending_approval", { command: "x" }]);
});

test("a recorded start with its trial is a question", () => {
  const old = { ...tried, approval_required: true, expires_at: 5, dry_run: dryRun } as AgentEvent;
  const item = played([start, old]).items[0]!;
  assert.deepEqual(item.kind === "tool" && [item.execution.status, item.execution.dryRun], ["pending_approval", dryRun]);
});

test("a denied call is denied after a reload, and its text is there once", () => {
  const error = { code: "denied", message: "The call was denied: ann said no.", details: { by: "ann" } };
  const [, item] = fromMessages([
    { seq: 1, role: "user", content: "hi", created_at: 0 },
    { seq: 2, role: "assistant", content: "", tool_calls: [{ id: "c", name: "t", arguments: "{}" }], created_at: 0 },
    { seq: 3, role: "tool", content: `Error (denied): ${error.message}`, tool_call_id: "c", is_error: true, error, created_at: 0 },
  ]);
  assert.equal(item?.kind === "tool" && isDenied(item.execution), true);
  assert.equal(item?.kind === "tool" && resultBesideError(item.execution), "");
  assert.equal(item?.kind === "tool" && resultBesideError({ ...item.execution, result: `Error (denied): ${error.message}\nHint: ask` }), "Hint: ask");
});

test("repeated events and gaps change nothing that is known", () => {
  const events: AgentEvent[] = [
    start,
    { type: "text_delta", seq: 2, text: "a" },
    { type: "text_delta", seq: 5, text: "b" },
    { type: "tool_start", seq: 6, tool_call_id: "c", tool_name: "t", tool_args: {}, approval_required: false, sandboxed: true },
    { type: "tool_end", seq: 9, tool_call_id: "c", result: "r", is_error: false, duration_ms: 1 },
  ];
  const once = played(events);
  assert.deepEqual(played(events.slice(1), once), once);
  assert.deepEqual(statuses(once), ["done"]);
  assert.equal(once.items[0]?.kind === "agent" && once.items[0].text, "ab");
});

test("a call of an unknown start is ignored", () => {
  const shown = played([start, { type: "tool_end", seq: 2, tool_call_id: "none", result: "", is_error: true, duration_ms: 0 }]);
  assert.deepEqual(shown.items, []);
});

test("the end of a run stops what still ran", () => {
  const shown = played([
    start,
    { type: "tool_start", seq: 2, tool_call_id: "c", tool_name: "t", tool_args: {}, approval_required: false, sandboxed: true },
    { type: "run_end", seq: 3, reason: "aborted", content: "", usage: {} },
  ]);
  assert.deepEqual(statuses(shown), ["error"]);
  assert.equal(shown.run?.ended?.reason, "aborted");
});

test("a replayed run is not shown twice with its stored messages", () => {
  const messages: StoredMessage[] = [
    { seq: 1, role: "user", content: "hi", created_at: 0 },
    { seq: 2, role: "assistant", content: "", tool_calls: [{ id: "c", name: "t", arguments: "{}" }], created_at: 0 },
  ];
  const before: Shown = { items: fromMessages(messages), run: null };
  const shown = played([start, { type: "tool_start", seq: 2, tool_call_id: "c", tool_name: "t", tool_args: {}, approval_required: false, sandboxed: true }], before);
  assert.deepEqual(shown.items.map((item) => item.kind), ["user", "tool"]);
});

test("messages become calls with their results", () => {
  const items = fromMessages([
    { seq: 1, role: "user", content: "hi", created_at: 0 },
    { seq: 2, role: "assistant", content: "text", tool_calls: [{ id: "c", name: "t", arguments: "not json" }], created_at: 0 },
    { seq: 3, role: "tool", content: "failed", tool_call_id: "c", is_error: true, error: { code: "x", message: "y" }, created_at: 0 },
  ]);
  const tool = items[2]!;
  assert.equal(tool.kind === "tool" && tool.execution.status, "error");
  assert.deepEqual(tool.kind === "tool" && tool.execution.toolArgs, { arguments: "not json" });
  assert.equal(tool.kind === "tool" && tool.execution.error?.code, "x");
});

test("a run without live text shows its answer once", () => {
  const shown = played([start, { type: "run_end", seq: 2, reason: "done", content: "answer", usage: {} }]);
  assert.deepEqual(shown.items.map((item) => item.kind === "agent" && item.text), ["answer"]);
});
