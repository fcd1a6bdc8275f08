// Uploads of a conversation: three at a time, with progress, and by parts if they are large.
import { signal } from "@preact/signals";
import { ApiError, at, call, failureOf } from "../api/calls";
import type { Me } from "../api/types";
import { t } from "../i18n";

export interface Sending {
  id: number;
  name: string;
  file: File;
  state: "queued" | "sending" | "checking" | "failed";
  percent: number;
  problem?: ApiError;
  abort?: () => void;
}

export interface Target {
  session: string;
  conversation: string;
  /** Make the session, before the first upload. */
  ensure: () => Promise<void>;
  done: () => void;
}

const AT_ONCE = 3;
const PARTIAL_FROM = 16 << 20; // bytes
const PART = 8 << 20;

export const sendings = signal<Sending[]>([]);
/** The name of the last file that was stored, for screen readers. */
export const stored = signal("");
let nextId = 1;
let active = 0;

function change(id: number, more: Partial<Sending>): void {
  sendings.value = sendings.value.map((each) => (each.id === id ? { ...each, ...more } : each));
}

export function remove(id: number): void {
  sendings.value.find((each) => each.id === id)?.abort?.();
  sendings.value = sendings.value.filter((each) => each.id !== id);
}

/** The reason not to send a file, or null. */
export function refusal(file: File, limits: Me["uploads"]): string | null {
  const units: Record<string, number> = { KB: 1024, MB: 1 << 20, GB: 1 << 30 };
  const most = limits.max_file_size * (units[limits.max_file_size_unit] ?? 1);
  if (file.size > most) return t("files.too_large", { size: `${limits.max_file_size} ${limits.max_file_size_unit}` });
  const type = file.name.split(".").pop()?.toLowerCase() ?? "";
  if (!limits.allowed_file_types.includes(type)) return t("files.wrong_type", { types: limits.allowed_file_types.join(", ") });
  return null;
}

export function upload(files: Iterable<File>, target: Target, limits: Me["uploads"]): void {
  for (const file of files) {
    const why = refusal(file, limits);
    const sending: Sending = { id: nextId++, name: file.name, file, state: why ? "failed" : "queued", percent: 0 };
    if (why) sending.problem = new ApiError("refused", why, 0);
    sendings.value = [...sendings.value, sending];
  }
  pump(target);
}

export function retry(id: number, target: Target): void {
  change(id, { state: "queued", percent: 0, problem: undefined });
  pump(target);
}

function pump(target: Target): void {
  const next = sendings.value.find((each) => each.state === "queued");
  if (!next || active >= AT_ONCE) return;
  active += 1;
  change(next.id, { state: "sending" });
  void send(next, target)
    .then(
      () => {
        sendings.value = sendings.value.filter((each) => each.id !== next.id);
        stored.value = next.name;
        target.done();
      },
      (problem: unknown) => change(next.id, { state: "failed", problem: problem as ApiError }),
    )
    .finally(() => {
      active -= 1;
      pump(target);
    });
  pump(target);
}

async function send(sending: Sending, target: Target): Promise<void> {
  await target.ensure();
  if (sending.file.size >= PARTIAL_FROM) return inParts(sending, target);
  const form = new FormData();
  form.append("conversation_id", target.conversation);
  form.append("subdir", "temparea");
  form.append("file", sending.file);
  const path = at(["api", "v1", "sessions", target.session, "files", "upload"]);
  await transfer("POST", path, form, (part) => progress(sending, part, sending.file.size), sending.id);
}

function progress(sending: Sending, sent: number, of: number): void {
  const percent = of ? Math.min(100, Math.floor((sent / of) * 100)) : 100;
  change(sending.id, { percent, state: percent === 100 ? "checking" : "sending" });
}

async function inParts(sending: Sending, target: Target): Promise<void> {
  const base = ["v1", "sandboxes", target.session, "conversations", target.conversation, "partials"];
  const made = await call<{ id: string }>("POST", at([...base]), { path: sending.file.name, size: sending.file.size, upload: true });
  for (let from = 0; from < sending.file.size; from += PART) {
    const part = sending.file.slice(from, from + PART);
    const path = at([...base, made.id], { offset: from, sha256: await digestOf(part) });
    await transfer("PATCH", path, part, (sent) => progress(sending, from + sent, sending.file.size + 1), sending.id);
  }
  change(sending.id, { state: "checking", percent: 100 });
  await call("POST", at([...base, made.id, "finish"]), { sha256: await digestOf(sending.file) });
}

async function digestOf(part: Blob): Promise<string> {
  const digest = await crypto.subtle.digest("SHA-256", await part.arrayBuffer());
  return [...new Uint8Array(digest)].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** fetch() reports no progress of a body that it sends. */
function transfer(method: string, path: string, body: FormData | Blob, onProgress: (sent: number) => void, id: number): Promise<void> {
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest();
    request.open(method, path);
    request.setRequestHeader("X-Sbx-Console", "1");
    request.upload.onprogress = (event) => onProgress(event.loaded);
    request.onload = () => {
      if (request.status < 400) return resolve();
      try {
        const { error } = JSON.parse(request.responseText) as { error: { code: string; message: string } };
        reject(failureOf(error, request.status));
      } catch {
        reject(new ApiError("http_error", `HTTP ${request.status}`, request.status));
      }
    };
    request.onerror = () => reject(new ApiError("offline", "the service cannot be reached", 0));
    request.onabort = () => reject(new ApiError("cancelled", "cancelled", 0));
    change(id, { abort: () => request.abort() });
    request.send(body);
  });
}
