import assert from "node:assert/strict";
import { test } from "node:test";
import en from "../i18n/en.json";
import ja from "../i18n/ja.json";
import zh from "../i18n/zh.json";

function flat(texts: object, prefix = ""): Map<string, string> {
  const all = new Map<string, string>();
  for (const [key, value] of Object.entries(texts)) {
    if (typeof value === "string") all.set(prefix + key, value);
    else for (const [inner, text] of flat(value as object, `${prefix}${key}.`)) all.set(inner, text);
  }
  return all;
}

const english = flat(en);
const SAME = /^(shell\.key\.)/;

for (const [name, texts] of Object.entries({ zh, ja })) {
  const other = flat(texts);
  test(`${name} has the same keys and placeholders`, () => {
    assert.deepEqual([...other.keys()].sort(), [...english.keys()].sort());
    for (const [key, text] of english) {
      const names = (of: string): string[] => [...of.matchAll(/\{\{(\w+)\}\}/g)].map((match) => match[1]!).sort();
      assert.deepEqual(names(other.get(key)!), names(text), key);
    }
  });
  test(`${name} is translated`, () => {
    const same = [...english].filter(([key, text]) => other.get(key) === text && !SAME.test(key) && /[a-z]{3}/.test(text));
    assert.deepEqual(same, []);
  });
}
