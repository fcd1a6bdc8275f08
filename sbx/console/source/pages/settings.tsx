// The settings of this browser, and the browsers that are logged in.
import { useSignal } from "@preact/signals";
import type { JSX } from "preact";
import { at, call, get } from "../api/calls";
import type { Login } from "../api/types";
import { language, LANGUAGES, setLanguage, t, when, type Language } from "../i18n";
import { Action, DataTable, Field, Loaded, safe, useLoaded } from "../parts/common";
import { logout, me, setSetting, setting } from "../shell/state";

export function SettingsPage(): JSX.Element {
  const theme = useSignal(setting("theme", "system"));
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
      <p class="fine">
        sbx {service.version} · {service.build} · {service.instance_id} · {t("settings.started", { date: when(service.started_at) })}
      </p>
    </div>
  );
}
