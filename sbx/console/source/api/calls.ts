// Calls of the service. Every error is an ApiError with the code of the service.
import { signal } from "@preact/signals";
import type { Problem } from "../types/agent";

export class ApiError extends Error {
  constructor(
    readonly code: string,
    message: string,
    readonly status: number,
    readonly hint?: string,
    readonly details?: Record<string, unknown>,
    readonly requestId?: string,
  ) {
    super(message);
  }
}

/** Set when the login of this browser is over: the page shows the login. */
export const loggedOut = signal(false);

export function failureOf(problem: Problem & { request_id?: string }, status = 0): ApiError {
  return new ApiError(problem.code, problem.message, status, problem.hint, problem.details, problem.request_id);
}

export async function request(method: string, path: string, body?: unknown, headers: Record<string, string> = {}): Promise<Response> {
  const init: RequestInit = { method, headers: { ...headers }, cache: "no-store", credentials: "same-origin" };
  const sent = init.headers as Record<string, string>;
  if (method !== "GET") sent["X-Sbx-Console"] = "1";
  if (body instanceof Blob) init.body = body;
  else if (body !== undefined) {
    sent["Content-Type"] = "application/json";
    init.body = JSON.stringify(body);
  }
  let reply: Response;
  try {
    reply = await fetch(path, init);
  } catch {
    throw new ApiError("offline", "the service cannot be reached", 0);
  }
  if (reply.ok) return reply;
  const failure = await errorIn(reply);
  if (reply.status === 401 && path !== "/api/v1/console/login") loggedOut.value = true;
  throw failure;
}

type Reviver = (this: unknown, name: string, value: unknown, context?: { source?: string }) => unknown;
const rawJson = (JSON as unknown as { rawJSON?: (text: string) => unknown }).rawJSON;

/** A value of JSON. A long integer, which a number of JavaScript would round, stays as its text:
 * JSON.stringify writes it again as it was. */
export function parsedJson(text: string): unknown {
  if (!rawJson || !/\d{16}/.test(text)) return JSON.parse(text);
  const whole: Reviver = (_name, value, context) =>
    typeof value === "number" && !Number.isSafeInteger(value) && /^-?\d+$/.test(context?.source ?? "") ? rawJson(context!.source!) : value;
  return JSON.parse(text, whole);
}

async function errorIn(reply: Response): Promise<ApiError> {
  try {
    const { error } = (await reply.json()) as { error: Problem };
    return failureOf(error, reply.status);
  } catch {
    return new ApiError("http_error", `HTTP ${reply.status}`, reply.status);
  }
}

export async function call<T>(method: string, path: string, body?: unknown): Promise<T> {
  const reply = await request(method, path, body);
  return (reply.status === 204 ? undefined : parsedJson(await reply.text())) as T;
}

export const get = <T>(path: string): Promise<T> => call<T>("GET", path);

/** A path of segments that may hold any text, and a query without its empty values. */
export function at(segments: readonly string[], query: Record<string, string | number | boolean | undefined> = {}): string {
  const path = segments.map((each) => encodeURIComponent(each)).join("/");
  const pairs = Object.entries(query).filter(([, value]) => value !== undefined && value !== "");
  const text = new URLSearchParams(pairs.map(([name, value]) => [name, String(value)])).toString();
  return `/${path}${text ? `?${text}` : ""}`;
}

/** All pages of a list. */
export async function all<T>(path: (cursor?: string) => string, most = 1000): Promise<T[]> {
  const items: T[] = [];
  let cursor: string | undefined;
  do {
    const page = await get<{ items: T[]; next_cursor?: string | null }>(path(cursor));
    items.push(...page.items);
    cursor = page.next_cursor ?? undefined;
  } while (cursor && items.length < most);
  return items;
}
