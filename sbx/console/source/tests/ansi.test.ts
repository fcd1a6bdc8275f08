import assert from "node:assert/strict";
import { test } from "node:test";
import { ansi, withoutReturns } from "../parts/ansi";

const ESC = "\u001b";

test("colours become classes of a closed list", () => {
  assert.deepEqual(ansi(`a${ESC}[31;1mb${ESC}[0mc`), [
    { text: "a", classes: "" },
    { text: "b", classes: "ansi-1 bold" },
    { text: "c", classes: "" },
  ]);
  assert.deepEqual(ansi(`${ESC}[38;5;196mx`), [{ text: "x", classes: "" }]);
});

test("every other escape is dropped", () => {
  const hostile = [`${ESC}]0;title\u0007`, `${ESC}]8;;http://x\u0007`, `${ESC}]52;c;aGk=\u0007`, `${ESC}[2J`, `${ESC}[?1049h`, `${ESC}c`, `${ESC}P1$r${ESC}\\`, `${ESC}^pm${ESC}\\`, ESC];
  assert.deepEqual(ansi(`a${hostile.join("")}`).map((piece) => piece.text), ["a"]);
});

test("a long text without an end of its escape takes linear time", () => {
  const begun = performance.now();
  ansi(`${ESC}]0;`.repeat(200_000));
  ansi(`${ESC}[${"1;".repeat(500_000)}`);
  assert.ok(performance.now() - begun < 2000);
});

test("a line that is written over shows its last state", () => {
  assert.equal(withoutReturns("10 %\r50 %\r100 %\ndone\r\n"), "100 %\ndone\r\n");
});
