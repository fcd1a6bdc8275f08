// A value of JSON as a tree.
import { useSignal } from "@preact/signals";
import type { JSX } from "preact";
import { t } from "../i18n";
import { safe } from "./common";

const CHILDREN = 200;
const LONGEST = 10_000; // characters of a value

/** A value of JSON. An object or a list is folded, save the outermost. */
export function JsonTree({ value, name, open }: { value: unknown; name?: string; open?: boolean }): JSX.Element {
  const unfolded = useSignal(open ?? false);
  const label = name === undefined ? "" : `${safe(name)}: `;
  if (typeof value !== "object" || value === null) return <div class="json">{label}{safe((JSON.stringify(value) ?? "").slice(0, LONGEST))}</div>;
  const children = Object.entries(value);
  const brackets = Array.isArray(value) ? "[ ]" : "{ }";
  return (
    <details class="json" open={unfolded.value} onToggle={(event) => (unfolded.value = event.currentTarget.open)}>
      <summary>{`${label}${brackets} ${children.length}`}</summary>
      {unfolded.value && children.slice(0, CHILDREN).map(([key, child]) => <JsonTree key={key} name={key} value={child} />)}
      {children.length > CHILDREN && <p class="fine">{t("output.truncated")}</p>}
    </details>
  );
}
