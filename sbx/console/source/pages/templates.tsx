// Templates of tasks: those of sbx, and those of the person.
import { useSignal } from "@preact/signals";
import type { JSX } from "preact";
import { at, call, get } from "../api/calls";
import type { Template } from "../api/types";
import { t } from "../i18n";
import { Action, Dialog, Field, Loaded, safe, useLoaded } from "../parts/common";
import { go } from "../shell/route";
import { Fill } from "./conversations";

export function TemplatesPage(): JSX.Element {
  const list = useLoaded<Template[]>(async () => (await get<{ items: Template[] }>("/api/v1/templates")).items);
  const filling = useSignal<Template | null>(null);
  const editing = useSignal<Template | "new" | null>(null);
  const use = (prompt: string): void => {
    localStorage.setItem("sbx.draft.new", prompt);
    go("/console/conversations");
  };
  return (
    <div class="page">
      <h1>{t("nav.templates")}</h1>
      <button type="button" class="primary" onClick={() => (editing.value = "new")}>
        {t("templates.new")}
      </button>
      <Loaded of={list}>
        {(templates) => (
          <ul class="cards">
            {templates.map((template) => (
              <li key={template.id} class="card">
                <h2>{template.built_in ? t(`template.${template.id}.name`, { defaultValue: template.name }) : safe(template.name)}</h2>
                <p>{template.built_in ? t(`template.${template.id}.description`, { defaultValue: template.description }) : safe(template.description)}</p>
                <div class="buttons">
                  <button type="button" class="primary" onClick={() => (template.variables.length ? (filling.value = template) : use(template.prompt))}>
                    {t("templates.use")}
                  </button>
                  <button type="button" onClick={() => (editing.value = template.built_in ? { ...template, id: "", name: `${template.name} 2`, built_in: false } : template)}>
                    {template.built_in ? t("templates.copy") : t("action.edit")}
                  </button>
                  {!template.built_in && (
                    <Action kind="danger" act={async () => (await call("DELETE", at(["api", "v1", "templates", template.id])), list.reload())}>
                      {t("action.delete")}
                    </Action>
                  )}
                </div>
              </li>
            ))}
          </ul>
        )}
      </Loaded>
      {filling.value && <Fill template={filling.value} onClose={() => (filling.value = null)} onUse={use} />}
      {editing.value && <EditTemplate template={editing.value === "new" ? null : editing.value} onClose={() => (editing.value = null)} done={list.reload} />}
    </div>
  );
}

function EditTemplate({ template, onClose, done }: { template: Template | null; onClose: () => void; done: () => void }): JSX.Element {
  const name = useSignal(template?.name ?? "");
  const description = useSignal(template?.description ?? "");
  const prompt = useSignal(template?.prompt ?? "");
  const save = async (): Promise<void> => {
    const names = [...new Set([...prompt.value.matchAll(/\{\{(\w+)\}\}/g)].map((match) => match[1]!))];
    const before = new Map((template?.variables ?? []).map((each) => [each.name, each]));
    const variables = names.map((each) => before.get(each) ?? { name: each, label: each, default: "" });
    const body = { name: name.value, description: description.value, prompt: prompt.value, variables };
    if (template?.id) await call("PATCH", at(["api", "v1", "templates", template.id]), body);
    else await call("POST", "/api/v1/templates", body);
    done();
    onClose();
  };
  return (
    <Dialog title={template?.id ? t("templates.edit") : t("templates.new")} onClose={onClose}>
      <Field label={t("templates.name")}>
        <input type="text" value={name.value} onInput={(event) => (name.value = event.currentTarget.value)} />
      </Field>
      <Field label={t("templates.description")}>
        <input type="text" value={description.value} onInput={(event) => (description.value = event.currentTarget.value)} />
      </Field>
      <Field label={t("templates.prompt")} hint={t("templates.prompt_hint")}>
        <textarea rows={6} value={prompt.value} onInput={(event) => (prompt.value = event.currentTarget.value)} />
      </Field>
      <div class="buttons">
        <Action kind="primary" act={save} disabled={!name.value.trim() || !prompt.value.trim()}>
          {t("action.save")}
        </Action>
        <button type="button" onClick={onClose}>
          {t("action.cancel")}
        </button>
      </div>
    </Dialog>
  );
}
