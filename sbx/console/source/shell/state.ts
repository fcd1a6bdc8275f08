// What all pages share: the caller, the pending approvals, the settings of the person.
import { signal } from "@preact/signals";
import { all, ApiError, at, call, get, loggedOut } from "../api/calls";
import type { Approval, Me } from "../api/types";
import { connect, follow, hellos } from "../live/socket";

export const me = signal<Me | null>(null);
export const startFailure = signal<ApiError | null>(null);
export const loginFailed = signal(false);
export const approvals = signal<Approval[]>([]);

type Notice = Record<string, unknown> & { type: string };
const listeners = new Set<(notice: Notice) => void>();

/** Call back for each notice of the owner, until the returned function is called. */
export function onNotice(listener: (notice: Notice) => void): () => void {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

export function setting(name: string, fallback: string): string {
  return localStorage.getItem(`sbx.${name}`) ?? fallback;
}

export function setSetting(name: string, value: string): void {
  localStorage.setItem(`sbx.${name}`, value);
}

/** Log in with the code of the address, if it has one, and begin. */
export async function start(): Promise<void> {
  const code = new URLSearchParams(location.hash.slice(1)).get("login");
  if (code) {
    history.replaceState(null, "", location.pathname);
    try {
      me.value = await call<Me>("POST", "/api/v1/console/login", { code });
    } catch {
      loginFailed.value = true;
    }
  }
  if (!me.value) {
    try {
      me.value = await get<Me>("/api/v1/me");
    } catch (error) {
      if (!loggedOut.value) startFailure.value = error as ApiError;
      return;
    }
  }
  loginFailed.value = false;
  loggedOut.value = false;
  follow({
    request: () => ({ topic: "owner" }),
    onEvent: (event) => receive(event as Notice),
  });
  hellos.subscribe((count) => {
    if (count > 0) void loadApprovals();
  });
  connect();
}

let approvalNotices = 0;
const loading = new Set<string>(); // calls that no notice has decided meanwhile

function receive(notice: Notice): void {
  if (notice.type.startsWith("approval.")) approvalNotices++;
  if (notice.type === "approval.pending") {
    void loadApproval(String(notice.tool_call_id));
  } else if (notice.type === "approval.decided") {
    loading.delete(String(notice.tool_call_id));
    approvals.value = approvals.value.filter((each) => each.tool_call_id !== notice.tool_call_id);
  }
  for (const listener of listeners) listener(notice);
}

async function loadApproval(id: string): Promise<void> {
  loading.add(id);
  try {
    const approval = await get<Approval & { decision: unknown }>(at(["api", "v1", "approvals", id]));
    if (!loading.has(id) || approval.decision) return;
    approvals.value = [...approvals.value.filter((each) => each.tool_call_id !== id), approval];
    notify(approval);
  } catch {
    // The next hello loads all of them again.
  } finally {
    loading.delete(id);
  }
}

export async function loadApprovals(): Promise<void> {
  try {
    for (;;) {
      const notices = approvalNotices;
      const list = await all<Approval>((cursor) => at(["api", "v1", "approvals"], { limit: 200, cursor }));
      // A list from before a notice would remove what the notice has added.
      if (notices !== approvalNotices) continue;
      approvals.value = list;
      return;
    }
  } catch {
    // The connection state shows that the service is away; the next hello loads them again.
  }
}

function notify(approval: Approval): void {
  if (setting("notifications", "off") !== "on" || !document.hidden) return;
  if (Notification.permission === "granted") new Notification("sbx", { body: approval.tool_name });
}

export async function logout(): Promise<void> {
  await call("POST", "/api/v1/console/logout", {});
  location.href = "/console/";
}
