// The settings of this browser, and the browsers that are logged in.
import { useSignal } from "@preact/signals";
import type { JSX } from "preact";
import { at, call, get } from "../api/calls";
import type { Key, Login, Token } from "../api/types";
import { language, LANGUAGES, setLanguage, t, when, type Language } from "../i18n";
import { Action, Ask, DataTable, Field, Loaded, Name, safe, useLoaded } from "../parts/common";
import { logout, me, setSetting, setting } from "../shell/state";

export function SettingsPage(): JSX.Element {
  const theme = useSignal(setting("theme", "system"));
  const tools = useSignal(setting("tools", "collapse"));
  const enter = useSignal(setting("enter", "on") === "on");
  const notifications = useSignal(setting("notifications", "off") === "on");
  const logins = useLoaded<Login[]>(async () => (await get<{ items: Login[] }>("/api/v1/console/sessions")).items);
  const allowNotifications = async (on: boolean): Promise<void> => {
    const allowed = on && (await Notification.requestPermission()) === "granted";
    notifications.value = allowed;
    setSetting("notifications", allowed ? "on" : "off");
  };
  const service = me.value!.service;
  return (
    <div class="page">
      <h1>{t("nav.settings")}</h1>
      <div class="fields">
        <Field label={t("settings.language")}>
          <select value={language.value} onChange={(event) => void setLanguage(event.currentTarget.value as Language)}>
            {Object.entries(LANGUAGES).map(([code, name]) => (
              <option key={code} value={code} lang={code}>
                {name}
              </option>
            ))}
          </select>
        </Field>
        <Field label={t("settings.theme")}>
          <select
            value={theme.value}
            onChange={(event) => {
              theme.value = event.currentTarget.value;
              setSetting("theme", theme.value);
              document.documentElement.dataset.theme = theme.value;
            }}
          >
            <option value="system">{t("settings.system")}</option>
            <option value="light">{t("settings.light")}</option>
            <option value="dark">{t("settings.dark")}</option>
          </select>
        </Field>
        <Field label={t("settings.tools")}>
          <select value={tools.value} onChange={(event) => setSetting("tools", (tools.value = event.currentTarget.value))}>
            <option value="collapse">{t("settings.collapse")}</option>
            <option value="expand">{t("settings.expand")}</option>
          </select>
        </Field>
      </div>
      <label class="choice">
        <input
          type="checkbox"
          checked={enter.value}
          onChange={(event) => {
            enter.value = event.currentTarget.checked;
            setSetting("enter", enter.value ? "on" : "off");
          }}
        />
        {t("settings.enter")}
      </label>
      <label class="choice">
        <input type="checkbox" checked={notifications.value} onChange={(event) => void allowNotifications(event.currentTarget.checked)} />
        {t("settings.notifications")}
      </label>
      <h2>{t("settings.logins")}</h2>
      <Loaded of={logins}>
        {(items) => (
          <DataTable label={t("settings.logins")} columns={[t("settings.browser"), t("settings.seen"), t("settings.ends"), ""]}>
                {items.map((login) => (
                  <tr key={login.id}>
                    <td>
                      {safe(login.user_agent)} {login.current && <span class="badge">{t("settings.this")}</span>}
                    </td>
                    <td>{when(login.last_seen_at)}</td>
                    <td>{when(login.expires_at)}</td>
                    <td>
                      <Action
                        label={t("settings.end", { date: when(login.created_at) })}
                        act={async () => {
                          if (login.current) return logout();
                          await call("DELETE", at(["api", "v1", "console", "sessions", login.id]));
                          logins.reload();
                        }}
                      >
                        {t("settings.end_short")}
                      </Action>
                    </td>
                  </tr>
                ))}
          </DataTable>
        )}
      </Loaded>
      {me.value!.operator && <Access />}
      <p class="fine">
        sbx {service.version} · {service.build} · {service.instance_id} · {t("settings.started", { date: when(service.started_at) })}
      </p>
    </div>
  );
}

/** The keys and tokens of the service, for its operator. */
function Access(): JSX.Element {
  const keys = useLoaded<Key[]>(async () => (await get<{ items: Key[] }>("/v1/admin/keys")).items.filter((key) => key.revoked_at === null));
  const tokens = useLoaded<Token[]>(async () => (await get<{ items: Token[] }>("/v1/admin/tokens")).items.filter((token) => token.revoked_at === null));
  const revoking = useSignal<{ path: string; name: string } | null>(null);
  const button = (kind: "keys" | "tokens", id: string, name: string): JSX.Element => (
    <button type="button" class="danger" aria-label={t("settings.revoke", { name: safe(name) })} onClick={() => (revoking.value = { path: at(["v1", "admin", kind, id]), name })}>
      {t("settings.revoke_short")}
    </button>
  );
  return (
    <>
      <h2>{t("settings.keys")}</h2>
      <p class="fine">{t("settings.make")}</p>
      <Loaded of={keys}>
        {(items) =>
          items.length === 0 ? (
            <p class="empty">{t("settings.no_keys")}</p>
          ) : (
            <DataTable label={t("settings.keys")} columns={[t("settings.key_name"), t("settings.owner"), t("settings.created"), t("settings.seen"), ""]}>
              {items.map((key) => (
                <tr key={key.id}>
                  <td>
                    <Name>{key.name ?? key.id}</Name> {key.operator && <span class="badge">{t("settings.operator_key")}</span>}
                  </td>
                  <td>
                    <Name>{key.owner}</Name>
                  </td>
                  <td>{when(key.created_at)}</td>
                  <td>{when(key.last_used_at)}</td>
                  <td>{button("keys", key.id, key.name ?? key.id)}</td>
                </tr>
              ))}
            </DataTable>
          )
        }
      </Loaded>
      <h2>{t("settings.tokens")}</h2>
      <Loaded of={tokens}>
        {(items) =>
          items.length === 0 ? (
            <p class="empty">{t("settings.no_tokens")}</p>
          ) : (
            <DataTable label={t("settings.tokens")} columns={[t("settings.user"), t("settings.agent"), t("settings.owner"), t("settings.scopes"), t("settings.ends"), ""]}>
              {items.map((token) => (
                <tr key={token.id}>
                  <td>
                    <Name>{token.user_id}</Name>
                  </td>
                  <td>
                    <Name>{token.agent_id ?? "–"}</Name>
                  </td>
                  <td>
                    <Name>{token.owner}</Name>
                  </td>
                  <td>{token.scopes === null ? "–" : safe(token.scopes.join(", "))}</td>
                  <td>{when(token.expires_at)}</td>
                  <td>{button("tokens", token.id, token.user_id)}</td>
                </tr>
              ))}
            </DataTable>
          )
        }
      </Loaded>
      {revoking.value && (
        <Ask
          title={t("settings.revoke_title")}
          text={t("settings.revoke_ask", { name: safe(revoking.value.name) })}
          action={t("settings.revoke_short")}
          act={async () => {
            await call("DELETE", revoking.value!.path);
            keys.reload();
            tokens.reload();
          }}
          onClose={() => (revoking.value = null)}
        />
      )}
    </>
  );
}
