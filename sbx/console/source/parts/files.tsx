// The files of a conversation: what people uploaded, and what the code works with.
import { useSignal } from "@preact/signals";
import type { JSX } from "preact";
import { useEffect, useRef } from "preact/hooks";
import { ApiError, at, call, get, request } from "../api/calls";
import type { FileEntry, Upload } from "../api/types";
import type { ImageFile } from "../types/agent";
import { errorText, size, t, when } from "../i18n";
import { me, onNotice } from "../shell/state";
import { Action, Ask, DataTable, Failure, Loaded, Name, Tabs, safe, useLoaded } from "./common";
import { Figure } from "./output";
import { TextPreview } from "./preview";
import { remove, retry, sendings, stored, upload, type Target } from "./uploads";

const IMAGES: Record<string, string> = { png: "image/png", jpg: "image/jpeg", jpeg: "image/jpeg", gif: "image/gif", webp: "image/webp", svg: "image/svg+xml" };
const PREVIEW_MOST = 1 << 20; // bytes

export function FilesPanel({ target }: { target: Target }): JSX.Element {
  const tab = useSignal("uploads");
  return (
    <aside id="panel-files" class="files" aria-label={t("files.title")} role="complementary">
      <Tabs
        label={t("files.title")}
        chosen={tab.value}
        choose={(id) => (tab.value = id)}
        tabs={[
          { id: "uploads", label: t("files.uploads"), content: () => <Uploads target={target} /> },
          { id: "workspace", label: t("files.workspace"), content: () => <Workspace sandbox={target.session} conversation={target.conversation} /> },
        ]}
      />
    </aside>
  );
}

/** Ask for files, as the button of the composer does too. */
export function pickFiles(target: Target): void {
  const input = document.createElement("input");
  input.type = "file";
  input.multiple = true;
  input.onchange = () => input.files && upload([...input.files], target, me.value!.uploads);
  input.click();
}

function Uploads({ target }: { target: Target }): JSX.Element {
  const deleting = useSignal<string | null>(null);
  const failure = useSignal<string | null>(null);
  const input = useRef<HTMLInputElement>(null);
  const base = ["api", "v1", "sessions", target.session, "files"];
  const list = useLoaded<Upload[]>(async () => {
    try {
      return (await get<{ items: Upload[] }>(at(base, { conversation_id: target.conversation }))).items;
    } catch (error) {
      if (error instanceof ApiError && error.status === 404) return [];
      throw error;
    }
  }, [target.session, target.conversation]);
  useEffect(() => onNotice((notice) => notice.type === "uploads.changed" && notice.conversation_id === target.conversation && list.reload()), [target.conversation]);
  const limits = me.value!.uploads;
  const download = async (name: string): Promise<void> => {
    failure.value = null;
    try {
      const reply = await request("GET", at([...base, name], { conversation_id: target.conversation }));
      const url = URL.createObjectURL(new Blob([await reply.arrayBuffer()], { type: "application/octet-stream" }));
      const link = document.createElement("a");
      link.href = url;
      link.download = name;
      link.click();
      setTimeout(() => URL.revokeObjectURL(url), 60_000);
    } catch (error) {
      failure.value = t("files.download_failed", { reason: errorText(error as ApiError) });
    }
  };
  return (
    <>
      <p class="fine">
        {t("files.limits", { count: limits.max_file_count, size: `${limits.max_file_size} ${limits.max_file_size_unit}` })}
        <br />
        {limits.allowed_file_types.join(", ")}
      </p>
      <input ref={input} class="hidden" type="file" multiple tabIndex={-1} aria-hidden="true" onChange={(event) => (upload([...(event.currentTarget.files ?? [])], target, limits), (event.currentTarget.value = ""))} />
      <button type="button" onClick={() => input.current?.click()}>
        {t("files.choose")}
      </button>
      <Sendings target={target} />
      <span class="hidden" role="status">
        {stored.value && t("files.stored", { name: safe(stored.value) })}
      </span>
      {failure.value && <p role="alert" class="failure">{failure.value}</p>}
      {list.error && list.error.code !== "offline" && (
        <p role="alert" class="failure">
          {t("files.list_failed", { reason: errorText(list.error) })}{" "}
          <button type="button" class="plain" onClick={list.reload}>
            {t("action.retry")}
          </button>
        </p>
      )}
      {list.value?.length === 0 && <p class="empty">{t("files.empty")}</p>}
      {list.value && list.value.length > 0 && (
        <DataTable label={t("files.table")} columns={[t("files.columns.name"), t("files.columns.size"), t("files.columns.uploaded"), ""]}>
            {list.value.map((file) => (
              <tr key={file.name}>
                <td>
                  <a href={at([...base, file.name], { conversation_id: target.conversation })} download={file.name} aria-label={t("files.download", { name: safe(file.name) })} onClick={(event) => (event.preventDefault(), void download(file.name))}>
                    <Name>{file.name}</Name>
                  </a>
                </td>
                <td>{size(file.size)}</td>
                <td>{when(file.uploaded_at)}</td>
                <td>
                  <button type="button" class="plain" aria-label={t("files.delete", { name: safe(file.name) })} onClick={() => (deleting.value = file.name)}>
                    ✕
                  </button>
                </td>
              </tr>
            ))}
        </DataTable>
      )}
      {deleting.value && (
        <Ask
          title={t("files.delete_ask")}
          text={deleting.value}
          action={t("action.delete")}
          act={async () => {
            await call("DELETE", at([...base, deleting.value!], { conversation_id: target.conversation }));
            list.reload();
          }}
          onClose={() => (deleting.value = null)}
        />
      )}
    </>
  );
}

function Sendings({ target }: { target: Target }): JSX.Element | null {
  if (sendings.value.length === 0) return null;
  return (
    <ul class="sendings">
      {sendings.value.map((each) => (
        <li key={each.id}>
          <Name>{each.name}</Name>
          {each.state === "failed" ? (
            <>
              <p role="alert" class="failure">
                {t("files.upload_failed", { reason: each.problem?.code === "refused" ? each.problem.message : errorText(each.problem!) })}
              </p>
              {each.problem?.code !== "refused" && (
                <button type="button" aria-label={t("files.retry", { name: safe(each.name) })} onClick={() => retry(each.id, target)}>
                  {t("action.retry")}
                </button>
              )}
            </>
          ) : (
            <>
              <progress max={100} value={each.percent} aria-label={t("files.uploading", { name: safe(each.name) })} />
              <span class="fine">{t(`files.state.${each.state}`, { percent: each.percent })}</span>
            </>
          )}
          <button type="button" class="plain" aria-label={t("files.cancel", { name: safe(each.name) })} onClick={() => remove(each.id)}>
            ✕
          </button>
        </li>
      ))}
    </ul>
  );
}

/** The files of the code, a directory at a time. To read them does not count as a use of the sandbox. */
export function Workspace({ sandbox, conversation }: { sandbox: string; conversation: string }): JSX.Element {
  const path = useSignal(".");
  const preview = useSignal<{ path: string; text: string; image?: ImageFile } | null>(null);
  const base = ["v1", "sandboxes", sandbox, "conversations", conversation];
  const list = useLoaded<FileEntry[]>(async () => {
    try {
      const reply = await get<{ entries?: FileEntry[]; items?: FileEntry[] } | FileEntry[]>(at([...base, "list"], { path: path.value, peek: true }));
      return Array.isArray(reply) ? reply : (reply.entries ?? reply.items ?? []);
    } catch (error) {
      if (error instanceof ApiError && error.status === 404) return [];
      throw error;
    }
  }, [sandbox, conversation, path.value]);
  const show = async (file: FileEntry): Promise<void> => {
    const type = IMAGES[file.name.split(".").at(-1)!.toLowerCase()];
    if (type) {
      preview.value = { path: file.path, text: "", image: { path: file.path, media_type: type, size: file.size ?? 0, alt: file.name } };
      return;
    }
    const reply = await request("GET", at([...base, "files"], { path: file.path, peek: true }));
    preview.value = { path: file.path, text: await reply.text() };
  };
  const up = path.value === "." ? null : path.value.split("/").slice(0, -1).join("/") || ".";
  return (
    <>
      <div class="buttons">
        <span class="path">
          <Name>{path.value}</Name>
        </span>
        {up !== null && (
          <button type="button" onClick={() => (path.value = up)}>
            {t("files.up")}
          </button>
        )}
        <button type="button" onClick={list.reload}>
          {t("action.reload")}
        </button>
        <a class="button" href={at([...base, "archive"], { path: path.value })} download>
          {t("files.archive")}
        </a>
      </div>
      <Loaded of={list}>
        {(entries) =>
          entries.length === 0 ? (
            <p class="empty">{t("files.empty")}</p>
          ) : (
            <ul class="tree">
              {entries.map((entry) => (
                <li key={entry.path}>
                  {entry.kind === "directory" ? (
                    <button type="button" class="plain" onClick={() => (path.value = path.value === "." ? entry.name : `${path.value}/${entry.name}`)}>
                      <Name>{`${entry.name}/`}</Name>
                    </button>
                  ) : (
                    <>
                      <a href={at([...base, "files"], { path: entry.path })} download={entry.name} aria-label={t("files.download", { name: safe(entry.name) })}>
                        <Name>{entry.name}</Name>
                      </a>{" "}
                      <span class="fine">{entry.size === null ? "" : size(entry.size)}</span>
                      {entry.size !== null && entry.size <= PREVIEW_MOST && (
                        <Action kind="plain" act={() => show(entry)} label={t("files.preview_of", { name: safe(entry.name) })}>
                          {t("files.preview")}
                        </Action>
                      )}
                    </>
                  )}
                </li>
              ))}
            </ul>
          )
        }
      </Loaded>
      {list.error && list.value && <Failure error={list.error} retry={list.reload} />}
      {preview.value && (
        <section aria-label={t("files.preview")} role="region">
          <p class="path">
            <Name>{preview.value.path}</Name>
          </p>
          {preview.value.image ? <Figure key={preview.value.path} number={1} image={preview.value.image} type={preview.value.image.media_type} place={{ sandbox, conversation }} /> : <TextPreview key={preview.value.path} name={preview.value.path} text={preview.value.text} />}
        </section>
      )}
    </>
  );
}
