// Terminal colours as classes of a closed list. Every other escape is dropped.

export interface Piece {
  text: string;
  classes: string;
}

const ESCAPE = /\u001b(?:\[([0-9;:?]*)[ -/]*([@-~])|\][^\u0007\u001b]*(?:\u0007|\u001b\\)?|[PX^_][^\u001b]*(?:\u001b\\)?|.)?/gs;

export function ansi(text: string): Piece[] {
  const pieces: Piece[] = [];
  let colour = "";
  let bold = false;
  let from = 0;
  const add = (part: string): void => {
    if (part) pieces.push({ text: part, classes: [colour, bold ? "bold" : ""].filter(Boolean).join(" ") });
  };
  for (const match of text.matchAll(ESCAPE)) {
    add(text.slice(from, match.index));
    from = match.index + match[0].length;
    if (match[2] !== "m") continue;
    for (const word of (match[1] || "0").split(/[;:]/)) {
      const number = Number(word || 0);
      if (number === 0) [colour, bold] = ["", false];
      else if (number === 1) bold = true;
      else if (number === 22) bold = false;
      else if ((number >= 30 && number <= 37) || (number >= 90 && number <= 97)) colour = `ansi-${number % 10}`;
      else if (number === 39) colour = "";
      else if (number === 38 || number === 48) break; // 256 colours are not shown
    }
  }
  add(text.slice(from));
  return pieces;
}

/** A progress bar writes one line over and over: only its last state is shown. */
export function withoutReturns(text: string): string {
  return text.replace(/[^\n]*\r(?!\n)/g, "");
}
