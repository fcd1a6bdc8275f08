// The content of a text file: a table of a CSV, a tree of JSON, or text.
import { useSignal } from "@preact/signals";
import type { JSX } from "preact";
import { useEffect } from "preact/hooks";
import { t } from "../i18n";
import { built } from "../shell/build";
import { JsonTree } from "./json";
import { Output, Table } from "./output";

const ROWS = 200;

export function TextPreview({ name, text }: { name: string; text: string }): JSX.Element {
  const kind = name.split(".").at(-1)!.toLowerCase();
  if (kind === "csv" || kind === "tsv") return <CsvPreview key={name} text={text} />;
  const value = kind === "json" || kind === "ipynb" ? parsedJson(text) : undefined;
  return value === undefined ? <Output text={text} /> : <JsonTree value={value} open />;
}

function CsvPreview({ text }: { text: string }): JSX.Element {
  const rows = useSignal<string[][] | null>(null);
  useEffect(() => {
    built<typeof import("./csv")>("csv").then(({ rowsOf }) => (rows.value = rowsOf(text, ROWS + 2)), () => (rows.value = []));
  }, [text]);
  if (rows.value === null) return <p class="fine" aria-busy="true">…</p>;
  if (rows.value.length === 0) return <Output text={text} />;
  return (
    <>
      <Table number={1} rows={rows.value.slice(0, ROWS + 1)} />
      {rows.value.length > ROWS + 1 && <p class="fine">{t("files.first_rows", { count: ROWS })}</p>}
    </>
  );
}

function parsedJson(text: string): unknown {
  try {
    return JSON.parse(text) as unknown;
  } catch {
    return undefined;
  }
}
