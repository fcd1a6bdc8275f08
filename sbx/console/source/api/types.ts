// The bodies of the routes that the page calls.
import type { DryRun, Problem, Remember } from "../types/agent";

export type Allowed = true | Problem;

export interface Me {
  owner: string;
  via: "peer" | "key" | "token" | "console";
  operator: boolean;
  user_id: string | null;
  agent_id: string | null;
  expires_at: number | null;
  service: { version: string; build: string; instance_id: string; started_at: number };
  can: { chat: Allowed; projects: Allowed; host_mode: Allowed; sandboxes: Allowed; admin: Allowed };
  defaults: { user_id: string; agent_id: string; policy: string; model: string | null; max_steps: number };
  project_dirs: string[];
  uploads: { max_file_size: number; max_file_size_unit: string; max_file_count: number; allowed_file_types: string[] };
}

export interface Chat {
  conversation_id: string;
  title: string;
  session_id: string;
  sandbox_id: string | null;
  user_id: string;
  agent_id: string;
  project_id: string | null;
  created_at: number;
  last_used_at: number;
  expires_at: number | null;
  run: { run_id: string; waiting: boolean } | null;
  pending: number;
}

export interface Approval {
  tool_call_id: string;
  tool_name: string;
  tool_args: Record<string, unknown>;
  conversation_id: string;
  created_at: number;
  expires_at: number;
  remember_as: Remember[];
  dry_run?: DryRun;
}

export interface Rule {
  id: string;
  tool_name: string;
  kind: "exact" | "prefix";
  text: string;
  by: string;
  created_at: number;
  conversation_id?: string;
  project_id?: string;
}

export interface Usage {
  cpu_s?: number;
  memory?: number;
  memory_max?: number;
  pids?: number;
  disk?: number;
  disk_max?: number;
  [name: string]: unknown;
}

export interface Sandbox {
  id: string;
  status: string;
  profile: string;
  created_at: string;
  expires_at: string | null;
  idle_expires_at: string | null;
  owner: string;
  session_id: string | null;
  user_id: string | null;
  agent_id: string | null;
  conversations: number;
  kernels: number;
  busy: boolean;
  stopped: boolean;
  failure: Problem | null;
  usage: Usage | null;
}

export interface Ended {
  id: string;
  profile: string;
  session_id: string | null;
  deleted_at: number;
  cause: string | null;
}

export interface Upload {
  name: string;
  size: number;
  uploaded_at: number;
}

export interface FileEntry {
  name: string;
  path: string;
  kind: "file" | "directory" | "symlink" | string;
  size: number | null;
  modified_s: number;
}

export interface Project {
  id: string;
  name: string;
  working_directory: string;
  sandbox_enabled: boolean;
  ask_commands: boolean;
  created_at: number;
  conversations: number;
  in_use: boolean;
}

export interface QuarantineItem {
  id: string;
  directory: string;
  path: string;
  name: string;
  program: string;
  kind: string;
}

export interface QuarantineContent extends QuarantineItem {
  content: string | null;
  entries: { path: string; kind: string; size: number | null }[] | null;
  target: string | null;
  complete: boolean;
}

export interface Key {
  id: string;
  owner: string;
  name: string | null;
  operator: boolean;
  created_at: string;
  last_used_at: string | null;
  revoked_at: string | null;
}

export interface Token {
  id: string;
  owner: string;
  user_id: string;
  agent_id: string | null;
  scopes: string[] | null;
  expires_at: string;
  revoked_at: string | null;
}

export interface Template {
  id: string;
  name: string;
  description: string;
  prompt: string;
  variables: { name: string; label: string; default: string }[];
  project_id: string | null;
  max_steps: number | null;
  built_in: boolean;
}

export interface Profile {
  description: string;
  welcome: string;
  starters: string[];
}

export interface Agent {
  agent_id: string;
  version: number | null;
  is_file: boolean;
  profile: Profile | null;
}

export interface PolicyItem {
  name: string;
  aliases: string[];
  description: string;
  extends: string | null;
  problem: string | null;
  network_mode: string | null;
  languages: string[] | null;
  capabilities: string[] | null;
}

export interface Login {
  id: string;
  created_at: number;
  last_seen_at: number;
  expires_at: number;
  user_agent: string;
  current: boolean;
}
