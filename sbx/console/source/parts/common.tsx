// Small parts that all pages use: buttons with their errors, lists with their states, dialogs, tabs.
import { useSignal } from "@preact/signals";
import type { ComponentChildren, JSX } from "preact";
import { useEffect, useLayoutEffect, useRef } from "preact/hooks";
import type { ApiError } from "../api/calls";
import { errorText, t } from "../i18n";
import { connection, hellos } from "../live/socket";

/** Untrusted text: control characters and bidi overrides are shown as their code points. */
export function safe(text: string): string {
  return text.replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200e\u200f\u202a-\u202e\u2066-\u2069]/g, (char) => `⟨${char.codePointAt(0)!.toString(16).padStart(4, "0")}⟩`);
}

// Letters and marks without a shape, and the blanks that look like a space.
const SHAPELESS = "\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\u{e0100}-\u{e01ef}";
const INVISIBLE = new RegExp(`(?![\\n\\t ])[\\p{C}\\p{Z}${SHAPELESS}]`, "gu");

/** Text that a person approves: each character that is invisible or moves others is shown as its code point. */
export function exact(text: string): string {
  return text.replace(INVISIBLE, (char) => `⟨${char.codePointAt(0)!.toString(16).padStart(4, "0")}⟩`);
}

export function Name({ children }: { children: string }): JSX.Element {
  return <bdi>{safe(children)}</bdi>;
}

export function Failure({ error, retry }: { error: ApiError; retry?: () => void }): JSX.Element {
  return (
    <div class="failure" role="alert">
      <p>{errorText(error)}</p>
      {error.hint && <p class="hint">{error.hint}</p>}
      <p class="fine">
        {error.code}
        {error.requestId && ` · ${error.requestId}`}
      </p>
      {retry && (
        <button type="button" onClick={retry}>
          {t("action.retry")}
        </button>
      )}
    </div>
  );
}

/** A value that loads now, at each hello, and when `reload` is called. The last value stays. */
export function useLoaded<T>(load: () => Promise<T>, keys: unknown[] = []): { value: T | null; error: ApiError | null; reload: () => void } {
  const value = useSignal<T | null>(null);
  const error = useSignal<ApiError | null>(null);
  const turn = useRef(0);
  const reload = (): void => {
    const mine = ++turn.current;
    load().then(
      (loaded) => {
        if (mine === turn.current) {
          value.value = loaded;
          error.value = null;
        }
      },
      (failure: unknown) => {
        if (mine === turn.current) error.value = failure as ApiError;
      },
    );
  };
  const hello = hellos.value;
  const key = JSON.stringify(keys);
  const shown = useRef(key);
  useEffect(() => {
    if (shown.current !== key) value.value = null;
    shown.current = key;
    reload();
    return () => {
      turn.current += 1;
    };
  }, [key, hello]);
  return { value: value.value, error: error.value, reload };
}

/** The states of a list: loading, an error without a value, or its content. */
export function Loaded<T>({ of, children }: { of: { value: T | null; error: ApiError | null; reload: () => void }; children: (value: T) => ComponentChildren }): JSX.Element {
  if (of.value !== null) return <>{children(of.value)}</>;
  if (of.error && of.error.code !== "offline") return <Failure error={of.error} retry={of.reload} />;
  return (
    <div class="skeleton" aria-busy="true">
      <span class="hidden">{t("state.loading")}</span>
      <i />
      <i />
      <i />
    </div>
  );
}

interface ActionProps {
  act: () => Promise<unknown> | void;
  children: ComponentChildren;
  kind?: "primary" | "danger" | "plain";
  disabled?: boolean;
  label?: string;
  title?: string;
}

/** A button whose action may fail: the error stands below it. It is off while the service is away. */
export function Action({ act, children, kind, disabled, label, title }: ActionProps): JSX.Element {
  const busy = useSignal(false);
  const error = useSignal<ApiError | null>(null);
  const away = connection.value !== "connected";
  const press = async (): Promise<void> => {
    busy.value = true;
    error.value = null;
    try {
      await act();
    } catch (failure) {
      error.value = failure as ApiError;
    } finally {
      busy.value = false;
    }
  };
  return (
    <>
      <button type="button" class={kind} disabled={disabled || busy.value || away} aria-label={label} title={away ? t("connection.reconnecting") : title} onClick={() => void press()}>
        {children}
      </button>
      {error.value && (
        <span class="failure inline" role="alert">
          {errorText(error.value)}
        </span>
      )}
    </>
  );
}

interface DialogProps {
  title: string;
  onClose: () => void;
  children: ComponentChildren;
  alert?: boolean;
  wide?: boolean;
}

/** A modal dialog. It closes by Escape, and the focus returns to its button. */
export function Dialog({ title, onClose, children, alert, wide }: DialogProps): JSX.Element {
  const ref = useRef<HTMLDialogElement>(null);
  useLayoutEffect(() => {
    const before = document.activeElement as HTMLElement | null;
    const shown = ref.current!;
    shown.showModal();
    return () => {
      shown.close(); // while it is modal, nothing outside can have the focus
      before?.focus();
    };
  }, []);
  return (
    <dialog ref={ref} class={wide ? "wide" : undefined} role={alert ? "alertdialog" : "dialog"} aria-label={title} onCancel={(event) => (event.preventDefault(), onClose())}>
      <h2>{title}</h2>
      {children}
    </dialog>
  );
}

export function Ask({ title, text, action, act, onClose }: { title: string; text: string; action: string; act: () => Promise<unknown>; onClose: () => void }): JSX.Element {
  return (
    <Dialog title={title} onClose={onClose} alert>
      <p>{text}</p>
      <div class="buttons">
        <Action kind="danger" act={async () => (await act(), onClose())}>
          {action}
        </Action>
        <button type="button" onClick={onClose}>
          {t("action.cancel")}
        </button>
      </div>
    </Dialog>
  );
}

export interface Tab {
  id: string;
  label: string;
  content: () => ComponentChildren;
}

interface TabListProps {
  label: string;
  tabs: { id: string; label: string }[];
  chosen: string;
  choose: (id: string) => void;
}

/** A row of tabs with the keys of the ARIA Authoring Practices. The panel of a tab is the element `panel-{id}`. */
export function TabList({ label, tabs, chosen, choose }: TabListProps): JSX.Element {
  const list = useRef<HTMLDivElement>(null);
  const onKey = (event: KeyboardEvent): void => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const place = tabs.findIndex((tab) => tab.id === chosen);
    const next = tabs[(place + step + tabs.length) % tabs.length]!;
    choose(next.id);
    list.current?.querySelector<HTMLElement>(`[data-tab="${next.id}"]`)?.focus();
  };
  return (
    <div ref={list} role="tablist" aria-label={label} onKeyDown={onKey}>
      {tabs.map((tab) => (
        <button key={tab.id} type="button" role="tab" data-tab={tab.id} id={`tab-${tab.id}`} aria-selected={tab.id === chosen} aria-controls={`panel-${tab.id}`} tabIndex={tab.id === chosen ? 0 : -1} onClick={() => choose(tab.id)}>
          {tab.label}
        </button>
      ))}
    </div>
  );
}

/** Tabs, and the panel of the chosen one. */
export function Tabs({ label, tabs, chosen, choose }: { label: string; tabs: Tab[]; chosen: string; choose: (id: string) => void }): JSX.Element {
  const shown = tabs.find((tab) => tab.id === chosen) ?? tabs[0]!;
  return (
    <div class="tabs">
      <TabList label={label} tabs={tabs} chosen={shown.id} choose={choose} />
      <div role="tabpanel" id={`panel-${shown.id}`} aria-labelledby={`tab-${shown.id}`} tabIndex={0}>
        {shown.content()}
      </div>
    </div>
  );
}

/** A table that scrolls to the side in a narrow window. An empty heading is that of its buttons. */
export function DataTable({ label, columns, children }: { label: string; columns: string[]; children: ComponentChildren }): JSX.Element {
  return (
    <div class="scroll" tabIndex={0}>
      <table aria-label={label}>
        <thead>
          <tr>{columns.map((column) => (column ? <th key={column} scope="col">{column}</th> : <td key={column} />))}</tr>
        </thead>
        <tbody>{children}</tbody>
      </table>
    </div>
  );
}

export function Field({ label, children, hint }: { label: string; children: ComponentChildren; hint?: string }): JSX.Element {
  return (
    <label class="field">
      <span>{label}</span>
      {children}
      {hint && <small>{hint}</small>}
    </label>
  );
}

/** The present second, for count-downs. */
export function useNow(everyMs = 1000): number {
  const now = useSignal(Date.now() / 1000);
  useEffect(() => {
    const timer = setInterval(() => (now.value = Date.now() / 1000), everyMs);
    return () => clearInterval(timer);
  }, []);
  return now.value;
}
