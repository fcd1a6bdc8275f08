// Projects: directories of the host in which agents work.
import { useSignal } from "@preact/signals";
import type { JSX } from "preact";
import { useEffect } from "preact/hooks";
import { all, at, call, get } from "../api/calls";
import type { Project } from "../api/types";
import { errorText, t, when } from "../i18n";
import { Action, Ask, DataTable, Dialog, Field, Loaded, Name, safe, useLoaded } from "../parts/common";
import { QuarantineSection } from "../parts/quarantine";
import { me, onNotice } from "../shell/state";

export function ProjectsPage(): JSX.Element {
  const list = useLoaded<Project[]>(() => all<Project>((cursor) => at(["api", "v1", "projects"], { limit: 100, cursor })));
  const dialog = useSignal<Project | "new" | null>(null);
  const deleting = useSignal<Project | null>(null);
  useEffect(() => onNotice((notice) => /^(project|chat)\./.test(notice.type) && list.reload()), []);
  const can = me.value!.can.projects;
  return (
    <div class="page">
      <h1>{t("nav.projects")}</h1>
      {can !== true && (
        <div class="failure" role="note">
          <p>{errorText(can)}</p>
          {can.hint && <p class="hint">{can.hint}</p>}
        </div>
      )}
      <button type="button" class="primary" disabled={can !== true} onClick={() => (dialog.value = "new")}>
        {t("projects.new")}
      </button>
      <Loaded of={list}>
        {(projects) =>
          projects.length === 0 ? (
            <p class="empty">{t("projects.none")}</p>
          ) : (
            <DataTable label={t("nav.projects")} columns={[t("projects.name"), t("projects.directory"), t("project.sandbox_mode"), t("projects.conversations"), t("projects.created"), ""]}>
                {projects.map((project) => (
                  <tr key={project.id}>
                    <td>
                      <Name>{project.name}</Name>
                    </td>
                    <td>
                      <code>{safe(project.working_directory)}</code>
                    </td>
                    <td class={project.sandbox_enabled ? "ok" : "bad"}>{project.sandbox_enabled ? t("projects.on") : t("projects.off")}</td>
                    <td>
                      {project.conversations} {project.in_use && <span class="badge">{t("projects.in_use")}</span>}
                    </td>
                    <td>{when(project.created_at)}</td>
                    <td class="buttons">
                      <button type="button" aria-label={t("projects.edit", { name: safe(project.name) })} onClick={() => (dialog.value = project)}>
                        {t("action.edit")}
                      </button>
                      <button type="button" class="danger" aria-label={t("projects.delete", { name: safe(project.name) })} onClick={() => (deleting.value = project)}>
                        {t("action.delete")}
                      </button>
                    </td>
                  </tr>
                ))}
            </DataTable>
          )
        }
      </Loaded>
      {can === true && <QuarantineSection />}
      {dialog.value && <ProjectDialog project={dialog.value === "new" ? null : dialog.value} onClose={() => (dialog.value = null)} done={list.reload} />}
      {deleting.value && (
        <Ask
          title={t("projects.delete_title")}
          text={t("projects.delete_ask", { directory: safe(deleting.value.working_directory) })}
          action={t("action.delete")}
          act={async () => {
            await call("DELETE", at(["api", "v1", "projects", deleting.value!.id]));
            list.reload();
          }}
          onClose={() => (deleting.value = null)}
        />
      )}
    </div>
  );
}

const SUGGESTED = 6; // directories

function ProjectDialog({ project, onClose, done }: { project: Project | null; onClose: () => void; done: () => void }): JSX.Element {
  const name = useSignal(project?.name ?? "");
  const directory = useSignal(project?.working_directory ?? (me.value!.project_dirs[0] ? `${me.value!.project_dirs[0]}/` : ""));
  const sandbox = useSignal(project?.sandbox_enabled ?? true);
  const commands = useSignal(project?.ask_commands ?? false);
  const sure = useSignal(false);
  const host = me.value!.can.host_mode;
  const below = directory.value.replace(/\/[^/]*$/, "") || undefined;
  const suggestions = useLoaded<{ items: { path: string }[] }>(async () => {
    try {
      return await get<{ items: { path: string }[] }>(at(["api", "v1", "projects", "directories"], { below }));
    } catch {
      return get<{ items: { path: string }[] }>("/api/v1/projects/directories");
    }
  }, [below]);
  const save = async (): Promise<void> => {
    if (!sandbox.value && !sure.value) {
      sure.value = true; // a second press confirms it
      return;
    }
    const body = { name: name.value, working_directory: directory.value, sandbox_enabled: sandbox.value, ask_commands: commands.value };
    if (project) await call("PATCH", at(["api", "v1", "projects", project.id]), body);
    else await call("POST", "/api/v1/projects", body);
    done();
    onClose();
  };
  return (
    <Dialog title={project ? t("projects.edit_title") : t("projects.new")} onClose={onClose}>
      <Field label={t("projects.name")}>
        <input type="text" value={name.value} onInput={(event) => (name.value = event.currentTarget.value)} />
      </Field>
      <Field label={t("projects.directory")}>
        <input type="text" value={directory.value} onInput={(event) => (directory.value = event.currentTarget.value)} />
      </Field>
      <div class="buttons">
        {suggestions.value?.items
          .filter((each) => each.path.startsWith(directory.value) && each.path !== directory.value)
          .slice(0, SUGGESTED)
          .map((each) => (
            <button key={each.path} type="button" class="plain" onClick={() => (directory.value = each.path)}>
              <Name>{each.path}</Name>
            </button>
          ))}
      </div>
      <label class="choice">
        <input
          type="checkbox"
          role="switch"
          checked={sandbox.value}
          disabled={sandbox.value && host !== true}
          onChange={(event) => {
            sandbox.value = event.currentTarget.checked;
            sure.value = false;
          }}
        />
        {t("project.sandbox_mode")}
      </label>
      {sandbox.value && host !== true && <p class="hint">{errorText(host)}</p>}
      {!sandbox.value && <p class="failure">{t("project.off_warning")}</p>}
      <label class="choice">
        <input type="checkbox" role="switch" checked={commands.value} onChange={(event) => (commands.value = event.currentTarget.checked)} />
        {t("project.ask_commands")}
      </label>
      <p class="hint">{t("project.ask_commands_hint")}</p>
      <div class="buttons">
        <Action kind={sandbox.value ? "primary" : "danger"} act={save} disabled={!name.value || !directory.value}>
          {sure.value ? t("projects.confirm") : project ? t("action.save") : t("action.create")}
        </Action>
        <button type="button" onClick={onClose}>
          {t("action.cancel")}
        </button>
      </div>
    </Dialog>
  );
}
