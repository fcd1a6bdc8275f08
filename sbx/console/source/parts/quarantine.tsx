// The quarantine of projects: files that programs of this computer would obey, to read, restore or delete.
import { useSignal } from "@preact/signals";
import type { JSX } from "preact";
import { at, call, get } from "../api/calls";
import type { QuarantineContent, QuarantineItem } from "../api/types";
import { size, t } from "../i18n";
import { Ask, DataTable, Dialog, Loaded, safe, useLoaded } from "./common";
import { Output } from "./output";

const BASE = ["api", "v1", "quarantine"];

export function QuarantineSection(): JSX.Element {
  const list = useLoaded<QuarantineItem[]>(async () => (await get<{ items: QuarantineItem[] }>(at(BASE))).items);
  const shown = useSignal<QuarantineItem | null>(null);
  const asked = useSignal<{ item: QuarantineItem; what: "restore" | "delete" } | null>(null);
  return (
    <section aria-labelledby="quarantine">
      <h2 id="quarantine">{t("quarantine.title")}</h2>
      <p class="fine">{t("quarantine.what")}</p>
      <Loaded of={list}>
        {(items) =>
          items.length === 0 ? (
            <p class="empty">{t("quarantine.none")}</p>
          ) : (
            <DataTable label={t("quarantine.table")} columns={[t("quarantine.path"), t("projects.directory"), t("quarantine.program"), ""]}>
              {items.map((item) => (
                <tr key={item.id}>
                  <td>
                    <code>{safe(item.path)}</code>
                  </td>
                  <td>
                    <code>{safe(item.directory)}</code>
                  </td>
                  <td>{obeyedBy(item)}</td>
                  <td class="buttons">
                    <button type="button" aria-label={t("quarantine.show", { path: safe(item.path) })} onClick={() => (shown.value = item)}>
                      {t("quarantine.show_short")}
                    </button>
                    <button type="button" aria-label={t("quarantine.restore", { path: safe(item.path) })} onClick={() => (asked.value = { item, what: "restore" })}>
                      {t("quarantine.restore_short")}
                    </button>
                    <button type="button" class="danger" aria-label={t("files.delete", { name: safe(item.path) })} onClick={() => (asked.value = { item, what: "delete" })}>
                      {t("action.delete")}
                    </button>
                  </td>
                </tr>
              ))}
            </DataTable>
          )
        }
      </Loaded>
      {shown.value && <ContentDialog item={shown.value} onClose={() => (shown.value = null)} />}
      {asked.value && <Decision {...asked.value} done={list.reload} onClose={() => (asked.value = null)} />}
    </section>
  );
}

function obeyedBy(item: QuarantineItem): string {
  return item.name === ".*" ? t("quarantine.hidden") : item.name === "-*" ? t("quarantine.option") : safe(item.program);
}

function Decision({ item, what, done, onClose }: { item: QuarantineItem; what: "restore" | "delete"; done: () => void; onClose: () => void }): JSX.Element {
  const restores = what === "restore";
  return (
    <Ask
      title={t(`quarantine.${what}_title`)}
      text={t(`quarantine.${what}_ask`, { path: safe(`${item.directory}/${item.path}`), program: obeyedBy(item) })}
      action={restores ? t("quarantine.restore_short") : t("action.delete")}
      act={async () => {
        await (restores ? call("POST", at([...BASE, item.id, "restore"])) : call("DELETE", at([...BASE, item.id])));
        done();
      }}
      onClose={onClose}
    />
  );
}

function ContentDialog({ item, onClose }: { item: QuarantineItem; onClose: () => void }): JSX.Element {
  const path = useSignal("");
  const content = useLoaded<QuarantineContent>(() => get(at([...BASE, item.id], { path: path.value })), [path.value]);
  return (
    <Dialog title={safe(item.path)} onClose={onClose} wide>
      {path.value && (
        <div class="buttons">
          <code>{safe(path.value)}</code>
          <button type="button" onClick={() => (path.value = path.value.split("/").slice(0, -1).join("/"))}>
            {t("files.up")}
          </button>
        </div>
      )}
      <Loaded of={content}>
        {(found) => (
          <>
            {found.target !== null && <p>{t("quarantine.link", { target: safe(found.target) })}</p>}
            {found.content !== null && <Output text={found.content} />}
            {found.entries && (
              <ul class="tree">
                {found.entries.map((entry) => (
                  <li key={entry.path}>
                    <button type="button" class="plain" onClick={() => (path.value = path.value ? `${path.value}/${entry.path}` : entry.path)}>
                      {safe(entry.path)}
                    </button>{" "}
                    <span class="fine">{entry.size === null ? safe(entry.kind) : size(entry.size)}</span>
                  </li>
                ))}
              </ul>
            )}
            {!found.complete && <p class="fine">{t("quarantine.incomplete")}</p>}
          </>
        )}
      </Loaded>
      <button type="button" onClick={onClose}>
        {t("action.close")}
      </button>
    </Dialog>
  );
}
