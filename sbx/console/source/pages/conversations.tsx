// Conversations with agents: the list, the messages with the calls of tools, the composer, the files.
import { useSignal } from "@preact/signals";
import type { JSX } from "preact";
import { useEffect, useMemo, useRef } from "preact/hooks";
import { all, ApiError, at, call, get } from "../api/calls";
import type { Agent, Chat, Project, Template } from "../api/types";
import { day, duration, errorText, t } from "../i18n";
import { EMPTY, fromMessages, reduce, type Item, type Shown } from "../live/reduce";
import { follow, hellos } from "../live/socket";
import { Action, Ask, Dialog, Failure, Field, Loaded, Name, safe, TabList, useLoaded, useNow } from "../parts/common";
import { FilesPanel, pickFiles } from "../parts/files";
import { Markdown, type Place } from "../parts/output";
import { ToolCallBlock } from "../parts/toolblock";
import { upload, type Target } from "../parts/uploads";
import { go } from "../shell/route";
import { me, onNotice, setting } from "../shell/state";
import type { AgentEvent, StoredMessage } from "../types/agent";

export function ConversationsPage({ id }: { id: string | undefined }): JSX.Element {
  const search = useSignal("");
  const list = useLoaded<Chat[]>(() => all<Chat>((cursor) => at(["api", "v1", "conversations"], { limit: 100, cursor, q: search.value || undefined }), 500), [search.value]);
  useEffect(() => onNotice((notice) => /^(conversation|chat|approval)\./.test(notice.type) && list.reload()), [search.value]);
  const projects = useLoaded<Project[]>(() => all<Project>((cursor) => at(["api", "v1", "projects"], { limit: 100, cursor })));
  useEffect(() => onNotice((notice) => notice.type.startsWith("project.") && projects.reload()), []);
  const fresh = useRef(newId());
  const begun = useRef<string | null>(null);
  // A conversation that has just begun gets its address, and stays the same part of the page.
  if (id === fresh.current) begun.current = id;
  else if (!id && begun.current === fresh.current) fresh.current = newId();
  const shownId = id ?? fresh.current;
  const now = list.value?.find((chat) => chat.conversation_id === shownId);
  const panel = useSignal("chat"); // of a narrow window, which shows one at a time
  useEffect(() => void (panel.value = "chat"), [shownId]);
  const panels = [
    { id: "list", label: t("nav.conversations") },
    { id: "chat", label: t("conversations.one") },
    { id: "files", label: t("files.title") },
  ];
  return (
    <div class="columns panels" data-panel={panel.value}>
      <div class="tabs">
        <TabList label={t("conversations.panels")} tabs={panels} chosen={panel.value} choose={(to) => (panel.value = to)} />
      </div>
      <section id="panel-list" class="side" role="region" aria-label={t("conversations.list")}>
        <div class="buttons">
          <button type="button" class="primary" onClick={() => go("/console/conversations")}>
            {t("conversations.new")}
          </button>
        </div>
        <input type="search" aria-label={t("conversations.search")} placeholder={t("conversations.search")} value={search.value} onInput={(event) => (search.value = event.currentTarget.value)} />
        <Loaded of={list}>
          {(chats) =>
            chats.length === 0 ? (
              <p class="empty">{search.value ? t("conversations.none_found") : t("conversations.none")}</p>
            ) : (
              <ul class="links">
                {chats.map((chat, place) => (
                  <li key={`${chat.user_id} ${chat.agent_id} ${chat.conversation_id}`}>
                    {(place === 0 || day(chats[place - 1]!.last_used_at) !== day(chat.last_used_at)) && <p class="fine">{day(chat.last_used_at)}</p>}
                    <a href={`/console/conversations/${encodeURIComponent(chat.conversation_id)}`} aria-current={chat.conversation_id === id ? "true" : undefined}>
                      <Name>{chat.title}</Name>
                    </a>
                    {chat.project_id && (
                      <span class="fine">
                        <Name>{projects.value?.find((project) => project.id === chat.project_id)?.name ?? chat.project_id}</Name>
                      </span>
                    )}
                    {chat.run && <span class={chat.run.waiting ? "badge waiting" : "badge"}>{chat.run.waiting ? t("run.waiting") : t("run.working")}</span>}
                  </li>
                ))}
              </ul>
            )
          }
        </Loaded>
      </section>
      <Conversation key={shownId} conversation={shownId} isNew={!id} chat={now} projects={projects.value ?? []} />
    </div>
  );
}

function newId(): string {
  const bytes = crypto.getRandomValues(new Uint8Array(8));
  return `conversation-${[...bytes].map((byte) => byte.toString(16).padStart(2, "0")).join("")}`;
}

function sessionOf(user: string, agent: string): string {
  return `sb-session-${user}-${agent}`;
}

interface ConversationProps {
  conversation: string;
  isNew: boolean;
  chat: Chat | undefined;
  projects: Project[];
}

function Conversation({ conversation, isNew, chat: listed, projects }: ConversationProps): JSX.Element {
  const loadedChat = useSignal<Chat | null>(null);
  // The list has the latest title, but not each old conversation.
  const chat = listed ?? loadedChat.value ?? undefined;
  const begins = useRef(isNew).current;
  const draftKey = `sbx.draft.${begins ? "new" : conversation}`;
  const shown = useSignal<Shown>(EMPTY);
  const failure = useSignal<ApiError | null>(null);
  const loaded = useSignal(begins);
  const stopping = useSignal(false);
  const project = useSignal("");
  const agent = useSignal(me.value!.defaults.agent_id);
  const draft = useSignal(localStorage.getItem(draftKey) ?? "");
  const maxSteps = useSignal(String(me.value!.defaults.max_steps));
  const model = useSignal("");
  const user = chat?.user_id ?? me.value!.defaults.user_id;
  const agentId = chat?.agent_id ?? agent.value;
  const session = chat?.session_id ?? sessionOf(user, agentId);
  // The same element as before is not drawn again: a key in the composer must not draw all messages.
  const messages = useMemo(() => <Messages items={shown.value.items} place={{ sandbox: session, conversation }} />, [shown.value.items, session]);
  // Called by listeners of an earlier rendering, which does not know the conversation or the chosen agent.
  const identity = (): { user_id: string; agent_id: string } => ({
    user_id: loadedChat.value?.user_id ?? user,
    agent_id: loadedChat.value?.agent_id ?? listed?.agent_id ?? agent.value,
  });
  const leave = useRef<(() => void) | null>(null);

  const watch = (runId?: string): void => {
    leave.current?.();
    leave.current = follow({
      request: () => ({ topic: "chat", conversation_id: conversation, ...identity(), run_id: runId, after: shown.value.run?.runId === runId ? shown.value.run?.lastSeq : 0 }),
      onEvent: (event) => {
        shown.value = reduce(shown.value, event as unknown as AgentEvent);
        if (event.type === "run_end") stopping.value = false;
      },
      onFailure: (error) => {
        // The run ended more than a minute ago: the messages have all of it.
        if (["no_chat", "run_interrupted"].includes(error.code)) void load(false);
      },
    });
  };

  const loads = useRef(0);
  const load = async (thenFollow = true): Promise<void> => {
    const turn = ++loads.current;
    try {
      // First: a run that ends after this is followed, one that ended before has all its messages.
      const stored = await get<Chat>(at(["api", "v1", "conversations", conversation]));
      loadedChat.value = stored;
      const running = stored.run;
      const messages = await all<StoredMessage>((cursor) => at(["api", "v1", "conversations", conversation, "messages"], { limit: 200, cursor }), 5000);
      if (turn !== loads.current) return; // a later one knows more
      // Its events are still on their way, and would be shown a second time after its messages.
      const isFollowed = shown.value.run !== null && !shown.value.run.ended;
      if (!running && isFollowed && thenFollow) return;
      const items = fromMessages(messages);
      if (!running) {
        for (const item of items) {
          if (item.kind === "tool" && item.execution.status === "running") Object.assign(item.execution, { status: "error", stopped: true });
        }
      }
      shown.value = { items, run: shown.value.run?.ended && !running ? shown.value.run : null };
      if (running && thenFollow) watch(running.run_id);
      failure.value = null;
    } catch (error) {
      if (error instanceof ApiError && error.status === 404) shown.value = { ...shown.value };
      else failure.value = error as ApiError;
    }
    loaded.value = true;
  };

  useEffect(() => {
    const unsubscribe = hellos.subscribe((count) => {
      if (count > 0 && (!begins || shown.value.items.length > 0)) void load();
    });
    const forget = onNotice((notice) => {
      if (notice.conversation_id !== conversation) return;
      const other = shown.value.run?.runId !== notice.run_id;
      if ((notice.type === "chat.started" || notice.type === "chat.ended") && other) void load();
      if (notice.type === "conversation.deleted") go("/console/conversations");
    });
    return () => {
      unsubscribe();
      forget();
      leave.current?.();
    };
  }, []);
  useEffect(() => localStorage.setItem(draftKey, draft.value), [draft.value]);

  const running = shown.value.run !== null && !shown.value.run.ended;
  const send = async (message: string | null): Promise<void> => {
    if (message !== null) {
      shown.value = { ...shown.value, items: [...shown.value.items, { kind: "user", key: `u${Date.now()}`, text: message }] };
    }
    const body = {
      ...identity(),
      conversation_id: conversation,
      project_id: (isNew && project.value) || undefined,
      detach: true,
      // The default is not sent: it could be lower than the limit in the profile of the agent.
      max_steps: Number(maxSteps.value) === me.value!.defaults.max_steps ? undefined : Number(maxSteps.value) || undefined,
      model: model.value || undefined,
      ...(message === null ? { resume: true } : { message }),
    };
    try {
      const started = await call<{ run_id: string }>("POST", "/api/v1/chat", body);
      draft.value = "";
      shown.value = { ...shown.value, run: { runId: started.run_id, maxSteps: Number(maxSteps.value), step: 1, lastSeq: 0 } };
      watch(started.run_id);
      if (isNew) {
        localStorage.removeItem("sbx.draft.new");
        go(`/console/conversations/${encodeURIComponent(conversation)}`, true);
      }
    } catch (error) {
      if (message !== null) shown.value = { ...shown.value, items: shown.value.items.slice(0, -1) };
      throw error;
    }
  };
  const stop = async (): Promise<void> => {
    stopping.value = true;
    await call("POST", at(["api", "v1", "chat", conversation, "abort"], { user_id: user, agent_id: agentId }));
  };
  const target: Target = {
    session,
    conversation,
    ensure: async () => {
      await call("POST", "/api/v1/sessions", { user_id: user, agent_id: agentId });
    },
    done: () => undefined,
  };
  const drop = (event: DragEvent): void => {
    event.preventDefault();
    if (event.dataTransfer?.files.length) upload([...event.dataTransfer.files], target, me.value!.uploads);
  };

  return (
    <div class="columns wide" onDragOver={(event) => event.preventDefault()} onDrop={drop}>
      <section id="panel-chat" class="chat" aria-label={t("conversations.one")}>
        <Title chat={chat} conversation={conversation} />
        {failure.value && <Failure error={failure.value} retry={() => void load()} />}
        {!loaded.value && <div class="skeleton" aria-busy="true"><i /><i /></div>}
        {loaded.value && shown.value.items.length === 0 && <Beginning agent={agent} projects={projects} project={project} onTemplate={(prompt) => (draft.value = prompt)} isNew={isNew} />}
        {messages}
        <Status shown={shown.value} stopping={stopping.value} again={() => send(null)} />
        <Composer draft={draft} running={running} send={send} stop={stop} attach={() => pickFiles(target)} maxSteps={maxSteps} model={model} />
      </section>
      <FilesPanel target={target} />
    </div>
  );
}

function Title({ chat, conversation }: { chat: Chat | undefined; conversation: string }): JSX.Element {
  const renaming = useSignal(false);
  const deleting = useSignal(false);
  const title = useSignal("");
  const now = useNow(10_000);
  if (!chat) return <h1>{t("conversations.new")}</h1>;
  const url = at(["api", "v1", "conversations", conversation], { user_id: chat.user_id, agent_id: chat.agent_id });
  const left = chat.expires_at === null ? null : chat.expires_at - now;
  return (
    <div class="title">
      <h1>
        <Name>{chat.title}</Name>
      </h1>
      {left !== null && left > 0 && left < 900 && (
        <span class="badge waiting">
          {t("session.left", { time: duration(left) })}{" "}
          <Action kind="plain" act={() => call("POST", at(["api", "v1", "sessions", chat.session_id, "extend_ttl"]), { extend_by: 3600 })}>
            {t("action.extend")}
          </Action>
        </span>
      )}
      {renaming.value ? (
        <form
          class="buttons"
          onSubmit={(event) => {
            event.preventDefault();
            void call("PATCH", url, { title: title.value }).then(() => (renaming.value = false));
          }}
        >
          <input type="text" aria-label={t("conversations.title")} maxLength={200} value={title.value} onInput={(event) => (title.value = event.currentTarget.value)} autoFocus />
          <button type="submit">{t("action.save")}</button>
        </form>
      ) : (
        <div class="buttons">
          <button type="button" onClick={() => ((title.value = chat.title), (renaming.value = true))}>
            {t("conversations.rename")}
          </button>
          {chat.project_id && <AllCommands chat={chat} />}
          <a class="button" href={at(["api", "v1", "conversations", conversation, "export"])} download={`${conversation}.json`}>
            {t("conversations.export")}
          </a>
          <button type="button" class="danger" onClick={() => (deleting.value = true)}>
            {t("conversations.delete")}
          </button>
        </div>
      )}
      {deleting.value && (
        <Ask
          title={t("conversations.delete_title")}
          text={t("conversation.delete_ask")}
          action={t("action.delete")}
          act={async () => {
            await call("DELETE", url);
            go("/console/conversations");
          }}
          onClose={() => (deleting.value = false)}
        />
      )}
    </div>
  );
}

/** Allow all commands of a conversation in its project, or ask about each again. */
function AllCommands({ chat }: { chat: Chat }): JSX.Element | null {
  const asking = useSignal(false);
  const path = at(["api", "v1", "conversations", chat.conversation_id, "commands"], { user_id: chat.user_id, agent_id: chat.agent_id });
  const permission = useLoaded<{ allowed: boolean }>(() => get(path), [path]);
  if (permission.value === null) return null;
  const { allowed } = permission.value;
  const set = async (to: boolean): Promise<void> => {
    await call("PUT", path, { allowed: to });
    permission.reload();
  };
  return (
    <>
      {allowed ? (
        <Action act={() => set(false)}>{t("conversations.ask_again")}</Action>
      ) : (
        <button type="button" onClick={() => (asking.value = true)}>
          {t("conversations.allow_all")}
        </button>
      )}
      {asking.value && <Ask title={t("conversations.allow_all")} text={t("conversations.allow_all_ask")} action={t("approval.allow")} act={() => set(true)} onClose={() => (asking.value = false)} />}
    </>
  );
}

interface BeginningProps {
  agent: { value: string };
  projects: Project[];
  project: { value: string };
  onTemplate: (prompt: string) => void;
  isNew: boolean;
}

/** Above an empty composer: where the agent works, and templates of tasks. */
function Beginning({ agent, projects, project, onTemplate, isNew }: BeginningProps): JSX.Element {
  const templates = useLoaded<Template[]>(async () => (me.value!.via === "token" ? [] : (await get<{ items: Template[] }>("/api/v1/templates")).items));
  const agents = useLoaded<Agent[]>(async () => (await get<{ items: Agent[] }>("/api/v1/agents")).items);
  const profile = agents.value?.find((each) => each.agent_id === agent.value)?.profile;
  const chosen = useSignal<Template | null>(null);
  const can = me.value!.can.chat;
  return (
    <div class="beginning">
      {can !== true && (
        <div class="failure" role="alert">
          <p>{errorText(can)}</p>
          {can.hint && <p class="hint">{can.hint}</p>}
        </div>
      )}
      {isNew && (
        <div class="fields">
          <Field label={t("conversations.project")}>
            <select value={project.value} onChange={(event) => (project.value = event.currentTarget.value)}>
              <option value="">{t("conversations.temporary")}</option>
              {projects.map((each) => (
                <option key={each.id} value={each.id}>
                  {safe(each.name)}
                </option>
              ))}
            </select>
          </Field>
          <Field label={t("conversations.agent")}>
            <input type="text" value={agent.value} onInput={(event) => (agent.value = event.currentTarget.value)} />
          </Field>
        </div>
      )}
      {isNew && agents.value && agents.value.length > 0 && (
        <div class="buttons" role="group" aria-label={t("conversations.agents")}>
          {agents.value.map((each) => (
            <button key={each.agent_id} type="button" aria-pressed={each.agent_id === agent.value} title={safe(each.profile?.description ?? "")} onClick={() => (agent.value = each.agent_id)}>
              <Name>{each.agent_id}</Name>
            </button>
          ))}
        </div>
      )}
      {profile?.welcome && (
        <p class="welcome">
          <Name>{profile.welcome}</Name>
        </p>
      )}
      <ul class="cards">
        {profile?.starters.map((starter) => (
          <li key={starter}>
            <button type="button" class="card" onClick={() => onTemplate(starter)}>
              {safe(starter)}
            </button>
          </li>
        ))}
        {templates.value?.map((template) => (
          <li key={template.id}>
            <button type="button" class="card" onClick={() => (template.variables.length ? (chosen.value = template) : onTemplate(template.prompt))}>
              <b>{template.built_in ? t(`template.${template.id}.name`, { defaultValue: template.name }) : safe(template.name)}</b>
              <small>{template.built_in ? t(`template.${template.id}.description`, { defaultValue: template.description }) : safe(template.description)}</small>
            </button>
          </li>
        ))}
      </ul>
      {chosen.value && <Fill template={chosen.value} onClose={() => (chosen.value = null)} onUse={onTemplate} />}
    </div>
  );
}

/** Ask for the variables of a template, and fill them in. */
export function Fill({ template, onClose, onUse }: { template: Template; onClose: () => void; onUse: (prompt: string) => void }): JSX.Element {
  const values = useSignal<Record<string, string>>(Object.fromEntries(template.variables.map((each) => [each.name, each.default])));
  const use = (): void => {
    onUse(template.prompt.replace(/\{\{(\w+)\}\}/g, (whole, name: string) => values.value[name] ?? whole));
    onClose();
  };
  return (
    <Dialog title={template.name} onClose={onClose}>
      {template.variables.map((each) => (
        <Field key={each.name} label={each.label || each.name}>
          <input type="text" value={values.value[each.name]} onInput={(event) => (values.value = { ...values.value, [each.name]: event.currentTarget.value })} />
        </Field>
      ))}
      <div class="buttons">
        <button type="button" class="primary" onClick={use}>
          {t("templates.use")}
        </button>
        <button type="button" onClick={onClose}>
          {t("action.cancel")}
        </button>
      </div>
    </Dialog>
  );
}

const WINDOW = 200; // messages that are in the page at once

function Messages({ items, place }: { items: Item[]; place: Place }): JSX.Element {
  const log = useRef<HTMLDivElement>(null);
  const atEnd = useSignal(true);
  const most = useSignal(WINDOW);
  const content = useRef<HTMLDivElement>(null);
  const last = useRef(0);
  const toEnd = (): void => log.current?.scrollTo({ top: log.current.scrollHeight });
  useEffect(() => {
    // Figures and long outputs grow after their message was shown.
    const grown = new ResizeObserver(() => atEnd.value && toEnd());
    grown.observe(content.current!);
    return () => grown.disconnect();
  }, []);
  const onScroll = (): void => {
    const box = log.current!;
    if (box.scrollHeight - box.scrollTop - box.clientHeight < 40) atEnd.value = true;
    else if (box.scrollTop < last.current) atEnd.value = false; // the person scrolls up
    last.current = box.scrollTop;
  };
  const lastStep = items.reduce((last, item) => (item.kind === "tool" ? Math.max(last, item.step) : last), 0);
  const left = Math.max(0, items.length - most.value);
  const lastPlan = items.filter((item) => item.kind === "tool" && item.execution.toolName === "plan").at(-1)?.key;
  return (
    <>
      <div ref={log} class="messages" role="log" aria-label={t("conversations.messages")} aria-live="off" tabIndex={0} onScroll={onScroll}>
        <div ref={content}>
        {left > 0 && (
          <button type="button" class="plain" onClick={() => (most.value += WINDOW)}>
            {t("conversations.earlier", { count: left })}
          </button>
        )}
        {items.slice(left).map((item, index) => {
          if (item.kind === "tool") {
            // The last plan stays open: it is how far the agent is.
            const past = item.key !== lastPlan && (item.step < lastStep || index + left < items.length - 1);
            return <ToolCallBlock key={item.key} execution={item.execution} place={place} past={past} />;
          }
          return (
            <article key={item.key} class={item.kind} aria-label={item.kind === "user" ? t("conversations.you") : t("conversations.agent")}>
              {item.kind === "user" ? <pre class="message">{safe(item.text)}</pre> : <Markdown text={item.text} />}
            </article>
          );
        })}
        </div>
      </div>
      {!atEnd.value && (
        <button type="button" class="latest" onClick={() => ((atEnd.value = true), toEnd())}>
          {t("conversations.latest")}
        </button>
      )}
    </>
  );
}

function Status({ shown, stopping, again }: { shown: Shown; stopping: boolean; again: () => Promise<void> }): JSX.Element {
  const run = shown.run;
  const waiting = shown.items.some((item) => item.kind === "tool" && item.execution.status === "pending_approval");
  let text = "";
  if (run && !run.ended) text = stopping ? t("run.stopping") : waiting ? t("run.waiting") : t("run.working");
  else if (run?.ended) text = { done: t("run.done"), aborted: t("run.stopped") }[run.ended.reason] ?? t("run.failed");
  const more = run?.ended && !["done", "aborted"].includes(run.ended.reason);
  return (
    <div class="run">
      <span role="status" aria-label={t("run.label")}>
        {text}
      </span>
      {run && !run.ended && <span class="fine">{t("run.step", { step: run.step, of: run.maxSteps })}</span>}
      {more && (
        <>
          <span class="failure">{run.ended!.error ? errorText(run.ended!.error) : t(`run.reason.${run.ended!.reason}`)}</span>
          <Action act={again}>{run.ended!.reason === "max_steps" ? t("action.continue") : t("action.retry")}</Action>
        </>
      )}
    </div>
  );
}

interface ComposerProps {
  draft: { value: string };
  running: boolean;
  send: (message: string) => Promise<void>;
  stop: () => Promise<void>;
  attach: () => void;
  maxSteps: { value: string };
  model: { value: string };
}

function Composer({ draft, running, send, stop, attach, maxSteps, model }: ComposerProps): JSX.Element {
  const error = useSignal<ApiError | null>(null);
  const busy = useSignal(false);
  const submit = async (): Promise<void> => {
    const message = draft.value.trim();
    if (!message || running || busy.value) return;
    busy.value = true;
    error.value = null;
    try {
      await send(message);
    } catch (failed) {
      error.value = failed as ApiError;
    } finally {
      busy.value = false;
    }
  };
  const onKey = (event: KeyboardEvent): void => {
    // Enter ends the conversion of an input method first; it sends only afterwards.
    if (event.key !== "Enter" || event.isComposing || event.keyCode === 229) return;
    const sends = event.ctrlKey || event.metaKey || (!event.shiftKey && setting("enter", "on") === "on");
    if (!sends) return;
    event.preventDefault();
    void submit();
  };
  return (
    <div class="composer">
      {error.value && <Failure error={error.value} />}
      <textarea
        aria-label={t("conversations.message")}
        placeholder={t("conversations.message")}
        rows={Math.min(10, Math.max(2, draft.value.split("\n").length))}
        value={draft.value}
        onInput={(event) => (draft.value = event.currentTarget.value)}
        onKeyDown={onKey}
      />
      <div class="buttons">
        <button type="button" onClick={attach}>
          {t("conversations.attach")}
        </button>
        <details>
          <summary>{t("conversations.options")}</summary>
          <Field label={t("conversations.model")}>
            <input type="text" placeholder={me.value!.defaults.model ?? ""} value={model.value} onInput={(event) => (model.value = event.currentTarget.value)} />
          </Field>
          <Field label={t("conversations.max_steps")}>
            <input type="number" min={1} max={1000} value={maxSteps.value} onInput={(event) => (maxSteps.value = event.currentTarget.value)} />
          </Field>
        </details>
        <span class="grow" />
        {running ? (
          <Action kind="danger" act={stop}>
            {t("conversations.stop")}
          </Action>
        ) : (
          <Action kind="primary" act={submit} disabled={!draft.value.trim() || busy.value}>
            {t("conversations.send")}
          </Action>
        )}
      </div>
    </div>
  );
}
