// What cells show, and cells as a file of Jupyter (nbformat 4.5).
import type { Bundle } from "../types/agent";

export interface Shown {
  text: string;
  outputs: Bundle[];
  /** The display id of each output, which a later event may replace. */
  ids: (string | null)[];
  asks: { prompt: string; password: boolean } | null;
  runId: string | null;
  running: boolean;
}

export interface Cell {
  key: number;
  code: string;
  shown: Shown | null;
}

export const NOTHING: Shown = { text: "", outputs: [], ids: [], asks: null, runId: null, running: false };

/** What a cell shows after one more event. */
export function after(shown: Shown, event: Record<string, unknown>): Shown {
  switch (event.type) {
    case "stdout":
    case "stderr":
      return { ...shown, text: shown.text + String(event.text) };
    case "display":
    case "result":
      return displayed(shown, event.data as Bundle, (event.display_id as string | undefined) ?? null, event.update === true);
    case "clear":
      return { ...shown, text: "", outputs: [], ids: [] };
    case "input_request":
      return { ...shown, asks: { prompt: String(event.prompt), password: Boolean(event.password) } };
    case "error":
      return { ...shown, text: `${shown.text}${traceback((event.error ?? event) as Traceback)}\n` };
    default:
      return shown;
  }
}

function displayed(shown: Shown, bundle: Bundle, id: string | null, update: boolean): Shown {
  if (update && id !== null) return { ...shown, outputs: shown.outputs.map((each, place) => (shown.ids[place] === id ? bundle : each)) };
  return { ...shown, outputs: [...shown.outputs, bundle], ids: [...shown.ids, id] };
}

interface Traceback {
  name: string;
  value: string;
  traceback?: string;
  traceback_ansi?: string;
}

export function traceback(error: Traceback): string {
  return error.traceback_ansi ?? error.traceback ?? `${error.name}: ${error.value}`;
}

const ESCAPES = /\u001b\[[0-9;]*m/g;

/** The lines of a text, each with its end, as Jupyter writes them. */
function lines(text: string): string[] {
  return text.match(/[^\n]*\n|[^\n]+$/g) ?? [];
}

function output(bundle: Bundle): object {
  const data = Object.fromEntries(Object.entries(bundle).filter(([, value]) => typeof value === "string"));
  return { output_type: "display_data", data, metadata: {} };
}

export function notebook(cells: readonly Cell[]): string {
  const body = {
    nbformat: 4,
    nbformat_minor: 5,
    metadata: { kernelspec: { name: "python3", display_name: "Python 3", language: "python" }, language_info: { name: "python" } },
    cells: cells
      .filter((cell) => cell.code.trim())
      .map((cell) => ({
        cell_type: "code",
        id: `cell-${cell.key}`,
        metadata: {},
        execution_count: null,
        source: lines(cell.code),
        outputs: [
          ...(cell.shown?.text ? [{ output_type: "stream", name: "stdout", text: lines(cell.shown.text.replace(ESCAPES, "")) }] : []),
          ...(cell.shown?.outputs ?? []).map(output),
        ],
      })),
  };
  return `${JSON.stringify(body, null, 1)}\n`;
}
