import assert from "node:assert/strict";
import { test } from "node:test";
import { after, notebook, NOTHING } from "../parts/notebook";

test("a cell shows text, errors and outputs in order", () => {
  const events = [
    { type: "stdout", text: "a\n" },
    { type: "stderr", text: "b\n" },
    { type: "display", data: { "text/plain": "1" } },
    { type: "error", error: { name: "ValueError", value: "no" } },
    { type: "unknown" },
  ];
  const shown = events.reduce(after, NOTHING);
  assert.equal(shown.text, "a\nb\nValueError: no\n");
  assert.deepEqual(shown.outputs, [{ "text/plain": "1" }]);
  assert.deepEqual(after(shown, { type: "clear" }), NOTHING);
});

test("an update replaces the display of its id", () => {
  const events = [
    { type: "display", data: { "text/plain": "0 %" }, display_id: "bar" },
    { type: "display", data: { "text/plain": "other" } },
    { type: "display", data: { "text/plain": "100 %" }, display_id: "bar", update: true },
  ];
  assert.deepEqual(
    events.reduce(after, NOTHING).outputs.map((bundle) => bundle["text/plain"]),
    ["100 %", "other"],
  );
});

test("cells become a notebook that Jupyter reads", () => {
  const shown = { ...NOTHING, text: "\u001b[31mred\u001b[0m\nlast", outputs: [{ "text/plain": "42", "image/png": { path: "a", media_type: "image/png", size: 1, alt: "" } }] };
  const body = JSON.parse(
    notebook([
      { key: 1, code: "print(1)\n6 * 7", shown },
      { key: 2, code: "  ", shown: null },
    ]),
  );
  assert.equal(body.nbformat, 4);
  assert.deepEqual(body.cells, [
    {
      cell_type: "code",
      id: "cell-1",
      metadata: {},
      execution_count: null,
      source: ["print(1)\n", "6 * 7"],
      outputs: [
        { output_type: "stream", name: "stdout", text: ["red\n", "last"] },
        { output_type: "display_data", data: { "text/plain": "42" }, metadata: {} },
      ],
    },
  ]);
});
