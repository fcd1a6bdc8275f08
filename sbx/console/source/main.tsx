// The page of the console: its frame, and the page of the address.
import { effect, signal, useSignal } from "@preact/signals";
import { options, render, type JSX } from "preact";
import { useEffect, useRef } from "preact/hooks";
import { loggedOut } from "./api/calls";
import { language, LANGUAGES, t, showLanguage, type Language } from "./i18n";
import { connection, newBuild } from "./live/socket";
import { ApprovalsPage } from "./pages/approvals";
import { ConversationsPage } from "./pages/conversations";
import { LoginPage } from "./pages/login";
import { PoliciesPage } from "./pages/policies";
import { ProjectsPage } from "./pages/projects";
import { SandboxPage } from "./pages/sandbox";
import { SandboxesPage } from "./pages/sandboxes";
import { SettingsPage } from "./pages/settings";
import { TemplatesPage } from "./pages/templates";
import { Dialog, Name } from "./parts/common";
import { go, path, segments } from "./shell/route";
import { approvals, logout, me, start, startFailure } from "./shell/state";

const PAGES = ["conversations", "approvals", "sandboxes", "projects", "templates", "policies", "settings"] as const;
const LANGUAGE_NAMES = Object.keys(LANGUAGES) as Language[];
const keys = signal(false);

function Page(): JSX.Element {
  const [page, id] = segments();
  switch (page) {
    case "approvals":
      return <ApprovalsPage />;
    case "sandboxes":
      return id ? <SandboxPage key={id} id={id} /> : <SandboxesPage />;
    case "projects":
      return <ProjectsPage />;
    case "templates":
      return <TemplatesPage />;
    case "policies":
      return <PoliciesPage />;
    case "settings":
      return <SettingsPage />;
    default:
      return <ConversationsPage id={page === "conversations" ? id : undefined} />;
  }
}

function App(): JSX.Element {
  void language.value;
  const main = useRef<HTMLElement>(null);
  const menu = useSignal(false); // in a narrow window
  const announced = useRef(0);
  const count = approvals.value.length;
  useEffect(() => {
    main.current?.focus();
    menu.value = false;
  }, [path.value]);
  useEffect(() => {
    announced.current = count;
  }, [count]);
  if (loggedOut.value || (!me.value && startFailure.value)) return <LoginPage />;
  if (!me.value) return <main class="login" aria-busy="true" />;
  const current = segments()[0] ?? "conversations";
  return (
    <>
      <a class="skip" href="#main" onClick={(event) => (event.preventDefault(), main.current?.focus())}>
        {t("shell.skip")}
      </a>
      <header class="banner">
        <strong class="brand">sbx</strong>
        <button type="button" class="menu" aria-expanded={menu.value} aria-controls="nav" onClick={() => (menu.value = !menu.value)}>
          {t("shell.menu")}
          {count > 0 && <span class="badge waiting count" data-count={count} aria-hidden="true" />}
        </button>
        <nav id="nav" class={menu.value ? "open" : ""} aria-label={t("shell.main")} onKeyDown={(event) => event.key === "Escape" && (menu.value = false)}>
          {PAGES.map((page) => (
            <a key={page} href={`/console/${page}`} aria-current={page === current ? "page" : undefined} aria-label={page === "approvals" && count ? t("nav.approvals_waiting", { name: t("nav.approvals"), count }) : undefined}>
              {t(`nav.${page}`)}
              {page === "approvals" && count > 0 && (
                <span class="badge waiting count" data-count={count} aria-hidden="true" />
              )}
            </a>
          ))}
        </nav>
        <span class="grow" />
        <span role="status" aria-label={t("connection.label")} class={`connection ${connection.value}`}>
          {connection.value === "connected" ? t("connection.connected") : t("connection.reconnecting")}
        </span>
        <span class="fine">
          <Name>{me.value.owner}</Name>
        </span>
        <button type="button" onClick={() => void logout()}>
          {t("shell.logout")}
        </button>
      </header>
      <span class="hidden" role="alert">
        {count > announced.current ? t("approval.announce", { count }) : ""}
      </span>
      {connection.value === "reconnecting" && <p class="notice">{t("connection.offline")}</p>}
      {newBuild.value && (
        <p class="notice">
          {t("shell.updated")}{" "}
          <button type="button" onClick={() => location.reload()}>
            {t("shell.reload")}
          </button>
        </p>
      )}
      <main ref={main} id="main" tabIndex={-1} aria-label={t(`nav.${PAGES.find((page) => page === current) ?? "conversations"}`)}>
        <Page />
      </main>
      {keys.value && (
        <Dialog title={t("shell.keys")} onClose={() => (keys.value = false)}>
          <dl class="facts">
            {["gc", "ga", "gs", "gp", "slash", "n", "question"].map((key) => (
              <div key={key}>
                <dt>{t(`shell.key.${key}`)}</dt>
                <dd>{t(`shell.does.${key}`)}</dd>
              </div>
            ))}
          </dl>
          <button type="button" onClick={() => (keys.value = false)}>
            {t("action.close")}
          </button>
        </Dialog>
      )}
    </>
  );
}

let prefix = false;

/** Shortcuts, none of them while a person types, and none that decides an approval. */
addEventListener("keydown", (event) => {
  const typing = (event.target as Element).closest?.("input, textarea, select, .terminal, dialog");
  if (typing || event.ctrlKey || event.metaKey || event.altKey || !me.value) return;
  if (prefix) {
    prefix = false;
    const page = { c: "conversations", a: "approvals", s: "sandboxes", p: "projects" }[event.key];
    if (page) go(`/console/${page}`);
  } else if (event.key === "g") prefix = true;
  else if (event.key === "n") go("/console/conversations");
  else if (event.key === "?") keys.value = true;
  else if (event.key === "/") {
    event.preventDefault();
    document.querySelector<HTMLInputElement>("input[type=search]")?.focus();
  }
});

effect(() => {
  const waiting = approvals.value.length;
  const [page] = segments();
  const name = t(`nav.${PAGES.find((each) => each === page) ?? "conversations"}`);
  document.title = `${waiting ? `(${waiting}) ` : ""}${name} · sbx`;
});

// Hundreds of events a second need one rendering a frame. A hidden page has no frames.
options.debounceRendering = (draw) => {
  if (document.hidden) setTimeout(draw);
  else requestAnimationFrame(draw);
};

async function begin(): Promise<void> {
  const chosen = LANGUAGE_NAMES.find((each) => each === document.documentElement.lang) ?? "en";
  await showLanguage(chosen).catch(() => undefined); // the texts are English then
  render(<App />, document.getElementById("app")!);
  await start();
}

void begin();
