// One WebSocket for all that changes. It connects again by itself, and follows its topics again.
import { signal } from "@preact/signals";
import { failureOf, loggedOut, parsedJson, type ApiError } from "../api/calls";
import type { Problem } from "../types/agent";

export type Connection = "connecting" | "connected" | "reconnecting";

export interface Topic {
  topic: string;
  [name: string]: unknown;
}

interface Following {
  request: () => Topic;
  onEvent: (event: Record<string, unknown>, seq: number) => void;
  onEnd?: () => void;
  onFailure?: (error: ApiError) => void;
}

const SILENCE_MS = 25_000; // the service beats every 10 seconds
const FIRST_WAIT_MS = 250;
const LONGEST_WAIT_MS = 10_000;

export const connection = signal<Connection>("connecting");
export const newBuild = signal(false);
/** Counts the hellos: lists load again when it changes. */
export const hellos = signal(0);

let socket: WebSocket | null = null;
let attempt = 0;
let watchdog = 0;
let retry = 0;
let nextId = 1;
let wanted = false;
const topics = new Map<string, Following>();

/** Begin, and stay connected until `disconnect`. */
export function connect(): void {
  wanted = true;
  open();
  addEventListener("online", soon);
}

export function disconnect(): void {
  wanted = false;
  removeEventListener("online", soon);
  clearTimeout(retry);
  socket?.close();
}

/** Follow a topic until the returned function is called. `request` is made for each connection. */
export function follow(following: Following): () => void {
  const id = String(nextId++);
  topics.set(id, following);
  if (connection.value === "connected") send({ do: "follow", id, ...following.request() });
  return () => {
    topics.delete(id);
    if (connection.value === "connected") send({ do: "drop", id });
  };
}

function send(message: unknown): void {
  if (socket?.readyState === WebSocket.OPEN) socket.send(JSON.stringify(message));
}

function soon(): void {
  clearTimeout(retry);
  if (wanted && connection.value !== "connected") open();
}

function open(): void {
  socket?.close();
  const opened = new WebSocket(`${location.origin.replace(/^http/, "ws")}/api/v1/events`);
  socket = opened;
  opened.onmessage = (message) => {
    if (opened === socket) receive(parsedJson(message.data as string) as Record<string, unknown>);
  };
  opened.onclose = (event) => {
    if (opened === socket) closed(event.code);
  };
  watch();
}

function watch(): void {
  clearTimeout(watchdog);
  // A connection without a network is not closed by itself for minutes.
  watchdog = window.setTimeout(() => {
    const silent = socket;
    closed(1006);
    silent?.close();
  }, SILENCE_MS);
}

function receive(message: Record<string, unknown>): void {
  watch();
  if (message.type === "hello") {
    attempt = 0;
    connection.value = "connected";
    const built = document.querySelector<HTMLMetaElement>("meta[name=sbx-build]")?.content;
    newBuild.value = built !== message.build;
    for (const [id, following] of topics) send({ do: "follow", id, ...following.request() });
    hellos.value += 1;
    return;
  }
  const following = topics.get(String(message.id));
  if (!following) return;
  if (message.event) following.onEvent(message.event as Record<string, unknown>, Number(message.seq));
  else if (message.type === "end") following.onEnd?.();
  else if (message.type === "failure") following.onFailure?.(failureOf(message.error as Problem));
}

function closed(code: number): void {
  clearTimeout(watchdog);
  socket = null;
  if (!wanted) return;
  connection.value = "reconnecting";
  if (code === 4401) {
    loggedOut.value = true;
    return;
  }
  const wait = Math.min(FIRST_WAIT_MS * 2 ** attempt++, LONGEST_WAIT_MS);
  retry = window.setTimeout(() => void check(), wait * (0.75 + Math.random() / 2));
}

/** A refused WebSocket has no status in a browser: ask whether the login is over. */
async function check(): Promise<void> {
  try {
    const reply = await fetch("/api/v1/me", { cache: "no-store" });
    if (reply.status === 401) {
      loggedOut.value = true;
      return;
    }
  } catch {
    // still offline
  }
  if (wanted) open();
}
