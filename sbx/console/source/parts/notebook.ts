// Cells as a file of Jupyter (nbformat 4.5).
import type { Bundle } from "../types/agent";

export interface Shown {
  text: string;
  outputs: Bundle[];
  asks: { prompt: string; password: boolean } | null;
  runId: string | null;
  running: boolean;
}

export interface Cell {
  key: number;
  code: string;
  shown: Shown | null;
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
