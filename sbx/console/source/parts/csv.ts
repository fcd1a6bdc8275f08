// The rows of a CSV file; loaded at the first preview of one.
import Papa from "papaparse";

const COLUMNS = 100;
const LONGEST = 1000; // characters of a cell

/** At most `most` rows, of a hostile file as well: one line may hold a million cells. The parser guesses the delimiter. */
export function rowsOf(text: string, most: number): string[][] {
  return Papa.parse<string[]>(text, { preview: most, skipEmptyLines: true }).data.map((row) => row.slice(0, COLUMNS).map((cell) => cell.slice(0, LONGEST)));
}
