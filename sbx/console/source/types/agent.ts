// The events of an agent's run, as sbx/protocol/agent.py has them, and what the page makes of them.

export type ToolStatus = "running" | "done" | "error" | "pending_approval";

export interface Problem {
  code: string;
  message: string;
  hint?: string;
  details?: Record<string, unknown>;
}

export interface FileChange {
  path: string;
  kind: "added" | "changed" | "removed" | string;
  diff?: string | null;
  [name: string]: unknown;
}

export interface DryRun {
  status?: string;
  exit_code?: number | null;
  output?: string;
  changes?: FileChange[];
  truncated?: boolean;
  left_out?: string[];
  host_executables?: { path: string; program: string }[];
  [name: string]: unknown;
}

export interface ImageFile {
  path: string;
  media_type: string;
  size: number;
  alt: string;
  data?: string;
}

export type Bundle = Record<string, string | ImageFile | boolean>;

export type Remember = "exact" | "prefix" | "hour" | "conversation";

export interface Decision {
  approved: boolean;
  by: string;
  remembered: Remember | null;
}

export interface ToolExecution {
  toolCallId: string;
  toolName: string;
  toolArgs: Record<string, unknown>;
  status: ToolStatus;
  sandboxed: boolean;
  expiresAt?: number;
  rememberAs?: Remember[];
  dryRun?: DryRun;
  decision?: Decision;
  output: { stream: "stdout" | "stderr"; text: string }[];
  result?: string;
  outputs?: Bundle[];
  error?: Problem | null;
  durationMs?: number;
  cached?: boolean;
  stopped?: boolean;
}

interface Common {
  seq?: number;
  run_id?: string;
  conversation_id?: string;
}

export type AgentEvent = Common &
  (
    | { type: "run_start"; model: string; max_steps: number; sandboxed: boolean; after_seq?: number; session_id?: string; sandbox_id?: string; project_id?: string }
    | { type: "text_delta"; text: string }
    | { type: "tool_start"; tool_call_id: string; tool_name: string; tool_args: Record<string, unknown>; approval_required: boolean | null; expires_at?: number; sandboxed: boolean; remember_as?: Remember[] }
    | { type: "tool_pending"; tool_call_id: string; tool_name: string; tool_args: Record<string, unknown>; expires_at: number; dry_run?: DryRun; remember_as?: Remember[] }
    | { type: "tool_output"; tool_call_id: string; stream: "stdout" | "stderr"; text: string }
    | { type: "tool_approval"; tool_call_id: string; approved: boolean; by: string; remembered: Remember | null }
    | { type: "tool_end"; tool_call_id: string; result: string; is_error: boolean; duration_ms: number; outputs?: Bundle[]; error?: Problem | null; cached?: boolean }
    | { type: "step_end"; step: number; usage: Record<string, number> }
    | { type: "run_end"; reason: "done" | "max_steps" | "aborted" | "budget" | "error"; content: string; usage: Record<string, number>; error?: Problem | null }
  );

export interface StoredMessage {
  seq: number;
  role: "user" | "assistant" | "tool" | "summary";
  content: string;
  tool_calls?: { id: string; name: string; arguments: string }[];
  tool_call_id?: string;
  name?: string;
  is_error?: boolean;
  outputs?: Bundle[];
  error?: Problem | null;
  created_at: number;
}
