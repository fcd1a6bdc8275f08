import assert from "node:assert/strict";
import { test } from "node:test";
import { EMPTY, fromMessages, reduce, type Shown } from "../live/reduce";
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
